"""``lightning-hybrid checkpoint``: look at a checkpoint, make one file of it, or check it; one process."""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_hybrid.cli.exporting import bytes_of, export_checkpoint, export_safetensors
from lightning_hybrid.cli.opened import Opened, OpenedFile, OpenedFolder, open_checkpoint
from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.states import MODEL, OPTIMIZER

SUFFIXES = (".ckpt", ".safetensors")
Row = tuple[str, ...]


def main(argv: list[str] | None = None) -> int:
    """Run one of the three commands.

    Args:
        argv: Arguments behind ``lightning-hybrid checkpoint``; None: those of the process.

    Returns:
        Exit status: 1 for a checkpoint that is missing, incomplete, damaged or another's, else 0. Arguments that cannot
        work end the process with status 2, as argparse does.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "export" and args.out.suffix not in SUFFIXES:
        parser.error(f"OUT must end in {' or '.join(SUFFIXES)}, got {args.out}")
    try:
        return int(args.run(args))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"lightning-hybrid checkpoint: {error}", file=sys.stderr)
        return 1


def inspect(args: argparse.Namespace) -> int:
    """Print what a checkpoint holds."""
    opened = open_checkpoint(args.path, trust=args.trust)
    about = opened.about
    written = ", ".join(f"{axis} {size}" for axis, size in about.layout.items())
    print(f"{opened.path}: {about.kind}" + (f", written by {written}" if written else ""))
    print(f"epoch {about.epoch}, step {about.global_step}", end="\n\n")
    names = [name for name in opened.tensors if args.all or name.startswith(MODEL)]
    rows = [("name", "shape", "type", "bytes", "chunks"), *(_row(opened, name) for name in names)]
    print(*_table(rows), sep="\n", end="\n\n")
    for second, first in opened.tied.items():
        print(f"{second} is {first}")
    print(*_summary(opened), sep="\n")
    return 0


def export(args: argparse.Namespace) -> int:
    """Write one file."""
    opened = open_checkpoint(args.path, trust=args.trust)
    if args.out.is_dir():
        raise IsADirectoryError(f"{args.out} is a folder. Give the name of a file.")
    model_only = args.weights_only or args.out.suffix == ".safetensors"
    with _bar("writing", bytes_of(opened, model_only=model_only)) as advance:
        if args.out.suffix == ".safetensors":
            missing = export_safetensors(opened, args.out, advance)
        else:
            missing = []
            export_checkpoint(opened, args.out, advance, weights_only=args.weights_only)
    if missing:
        print(f"left out, since safetensors has no place for it: {', '.join(missing)}", file=sys.stderr)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Read everything and compare it with its checksums."""
    path: Path = args.path
    wrong = _damaged_records(path) if path.is_file() else list(_damages(open_checkpoint(path)))
    for line in wrong:
        print(line)
    if wrong:
        raise RuntimeError(f"{path} is damaged ({len(wrong)} error(s)). Take another checkpoint.")
    opened = open_checkpoint(path, trust=args.trust)
    print(f"{path} is whole: {len(opened.tensors)} tensors, {bytes_of(opened, model_only=False):,} bytes")
    return 0


def _damages(opened: Opened) -> Iterator[str]:
    assert isinstance(opened, OpenedFolder), "a path that is no file is a folder"
    for name, expected in opened.manifest.files.items():
        path = opened.folder / name
        if not path.exists():
            yield f"{path} is missing"
        elif folders.checksum(path) != tuple(expected):
            yield f"{path} is not what was written: its length or checksum differs"
    with _bar("reading", bytes_of(opened, model_only=False)) as advance:
        for name in opened.tensors:
            try:
                for _, data in opened.parts(name):
                    advance(data.nbytes)
            except RuntimeError as error:
                yield str(error)
    yield from (
        f"{second} is tied to {first}, which is missing"
        for second, first in opened.manifest.tied.items()
        if first not in opened.tensors
    )


def _damaged_records(path: Path) -> list[str]:
    """What is wrong with a file of torch.save, whose format is a zip archive's."""
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        return [f"{path} is no file of torch.save, or a part of one: {error}"]
    if record is None:
        return []
    return [f"{_names_of(path, record)} in {path} is not what was written: the checksum differs"]


def _names_of(path: Path, record: str) -> str:
    """The tensors of a damaged record, and the record."""
    try:
        names = OpenedFile(path, trust=False).names_of(record)
    except RuntimeError:  # the damaged record says what is where
        names = []
    return f"{', '.join(names)} ({record})" if names else record


def _row(opened: Opened, name: str) -> Row:
    shape, dtype = opened.tensors[name]
    words = " x ".join(map(str, shape)) or "scalar"
    size = Box.of(shape).numel * dtype.itemsize
    return name, words, str(dtype).removeprefix("torch."), f"{size:,}", str(opened.chunks(name))


def _table(rows: list[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = (False, False, False, True, True)
    cells = [
        [cell.rjust(n) if right else cell.ljust(n) for cell, n, right in zip(row, widths, numbers, strict=True)]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def _summary(opened: Opened) -> Iterator[str]:
    """A line for the model, for each optimizer, for what else there is, and for all."""
    groups: dict[str, list[str]] = {}
    for name in opened.tensors:
        kind, _, rest = name.partition(".")
        groups.setdefault(f"{kind} {rest.partition('.')[0]}" if name.startswith(OPTIMIZER) else kind, []).append(name)
    for group, names in groups.items():
        entries = sorted({name.rpartition(".")[2] for name in names}) if group.startswith("optimizer") else []
        yield f"{group}: {_size(opened, names)}" + (f" ({', '.join(entries)})" if entries else "")
    yield f"total: {_size(opened, list(opened.tensors))}"


def _size(opened: Opened, names: list[str]) -> str:
    specs = [opened.tensors[name] for name in names]
    return f"{len(names)} tensors, {sum(Box.of(shape).numel * dtype.itemsize for shape, dtype in specs):,} bytes"


@contextmanager
def _bar(words: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show on standard error how many bytes are done."""
    columns = TextColumn(words), DownloadColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("left")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-hybrid checkpoint",
        description="Look at a checkpoint, make one file of it, or check it.",
        epilog="PATH is a folder that state_dict_type='sharded' has written, or a file of any strategy.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    lines = {
        "inspect": (inspect, "print tensors, layout and progress"),
        "export": (export, "write one .ckpt file, which any strategy loads, or the weights as .safetensors"),
        "verify": (verify, "read everything and compare it with its checksums"),
    }
    for name, (run, line) in lines.items():
        command = commands.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
        command.set_defaults(run=run)
        command.add_argument("path", type=Path, metavar="PATH", help="the checkpoint")
        command.add_argument("--trust", action="store_true", help="load objects of any class, which may run code")
        if name == "inspect":
            command.add_argument("--all", action="store_true", help="optimizer states too, tensor by tensor")
        if name == "export":
            command.add_argument("out", type=Path, metavar="OUT", help="the file; its suffix is its format")
            command.add_argument("--weights-only", action="store_true", help="state_dict and hyper-parameters alone")
    return parser
