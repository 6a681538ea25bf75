"""``lightning-hybrid demo``: train the example GPT on four processes and show what came of it.

The model is examples/gpt.py, which knows nothing of parallelism. Each rank runs this file; rank 0 prints.
"""

import argparse
import importlib.util
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that --help is quick
    from lightning.pytorch import Trainer

    from lightning_hybrid.cli.progress import Progress

PIPELINE, CHUNKS, MICRO_BATCHES, GLOBAL_BATCH = 2, 2, 4, 16
VALIDATIONS = 4  # spread over the training, the last behind its last step
PROMPTS = ("def ", "class ", "import ")


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments behind ``lightning-hybrid demo``; None: those of the process.

    Returns:
        Exit status: 0, or 1 if the example is not there.
    """
    args = _parser().parse_args(argv)
    args.steps = -(-max(1, args.steps) // VALIDATIONS) * VALIDATIONS
    path = find_example()
    if path is None:
        print(
            "The demo trains examples/gpt.py, which is part of the repository and not of the installed package. "
            "Run `make demo` in a clone, or this command in a folder that holds examples/gpt.py.",
            file=sys.stderr,
        )
        return 1
    _run(load_example(path), args)
    return 0


def find_example() -> Path | None:
    """Look for examples/gpt.py in the working folder, then in the checkout that this package is imported from."""
    places = (root / "examples" / "gpt.py" for root in (Path.cwd(), Path(__file__).resolve().parents[2]))
    return next((path for path in places if path.is_file()), None)


def load_example(path: Path) -> ModuleType:
    """Import a file by its path, under a name that no installed package has."""
    spec = importlib.util.spec_from_file_location("lightning_hybrid_demo_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # load_from_checkpoint and pickles look the class up there
    spec.loader.exec_module(module)
    return module


def _run(example: ModuleType, args: argparse.Namespace) -> None:
    from lightning.pytorch import seed_everything

    from lightning_hybrid.cli.progress import Progress

    for package in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")  # advice for real trainings, such as loader workers
    began, progress = time.perf_counter(), Progress(late=min(20, args.steps))
    trainer = _trainer(args, progress)
    seed_everything(0, verbose=False)
    model = example.GPT()
    if trainer.is_global_zero:
        print(_introduction(model, args), flush=True)
    replicas = max(1, args.processes // PIPELINE)
    trainer.fit(model, example.StandardLibrary(batch_size=GLOBAL_BATCH // replicas))
    checkpoint = args.out / "gpt.ckpt"
    trainer.save_checkpoint(checkpoint)
    if trainer.is_global_zero:
        print(f"\nbits per byte on held-out files: {progress.history[0]:.2f} -> {progress.history[-1]:.2f}")
        _show_samples(example, checkpoint)
        if progress.steps_events:
            _show_pipeline(progress, args.out / "timeline.png")
        print(f"\nwrote {args.out}/: {', '.join(sorted(path.name for path in args.out.iterdir()))}")
        print(f"took {time.perf_counter() - began:.0f} s")


def _trainer(args: argparse.Namespace, progress: "Progress") -> "Trainer":
    from lightning.pytorch import Trainer

    from lightning_hybrid import HybridPTDPStrategy

    strategy: Any = "auto"
    if args.processes > 1:
        strategy = HybridPTDPStrategy(
            pipeline_parallel_size=PIPELINE,
            num_chunks=CHUNKS,
            num_microbatches=MICRO_BATCHES,
            schedule="interleaved_1f1b",
        )
    return Trainer(
        accelerator="cpu",
        devices=args.processes,
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=args.steps,
        val_check_interval=args.steps // VALIDATIONS,
        num_sanity_val_steps=-1,  # a whole validation before the first step
        gradient_clip_val=1.0,
        callbacks=[progress],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _introduction(model: Any, args: argparse.Namespace) -> str:
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    layout = f"pipeline {PIPELINE} x data {args.processes // PIPELINE}, {CHUNKS} chunks a rank"
    batch = f"{args.steps} steps of {GLOBAL_BATCH} x {model.hparams['context']} bytes"
    first = f"A byte-level GPT, {len(model.blocks)} blocks, {size:.2f} M parameters, learns Python's standard library:"
    if args.processes == 1:
        return f"{first}\n{batch}, one process on {_cores()} cores"
    return f"{first}\n{batch}\n{args.processes} processes on {_cores()} cores: {layout}, {MICRO_BATCHES} micro-batches"


def _show_samples(example: ModuleType, checkpoint: Path) -> None:
    import torch

    model = example.GPT.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    torch.manual_seed(0)
    for prompt in PROMPTS:
        lines = [line.rstrip() for line in model.generate(prompt, length=200).splitlines()]
        print("\n" + "\n".join([f"    {line[:100]}" for line in lines if line][:5]))


def _show_pipeline(progress: "Progress", picture: Path) -> None:
    from lightning_hybrid.functional.drawing import timeline_png
    from lightning_hybrid.functional.simulation import theoretical_bubble_share

    shares = [bubble_share(events) for events in progress.steps_events]
    measured, theory = sum(shares) / len(shares), theoretical_bubble_share(PIPELINE, MICRO_BATCHES, CHUNKS)
    print(f"\nbubble: {measured:.1%} of a step, mean of {len(shares)} steps; {theory:.1%} in theory (equal stages)")
    if _cores() < PIPELINE * 2:
        print(f"    the four processes share {_cores()} cores and wait for them, so this is no measure of the schedule")
    timeline_png(progress.steps_events[-1], picture, title="One training step of one replica", unit="s")


def bubble_share(events: list[tuple[int, Any, float, float]]) -> float:
    """Give the share of a step in which the pipeline ranks did not compute.

    Args:
        events: Rank, action, start and end of what one replica did in a step; transfers are left out.

    Returns:
        One less the ranks' computing time over ranks times the time from the first start to the last end.
    """
    compute = [event for event in events if event[1].kind.value in ("forward", "backward")]
    busy = sum(end - start for _, _, start, end in compute)
    span = max(end for *_, end in compute) - min(start for _, _, start, _ in compute)
    return 1 - busy / (len({rank for rank, *_ in compute}) * span)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-hybrid demo", description="Train a small GPT and show the result.")
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where to write: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=600, metavar="N", help="training steps, rounded up to a multiple of 4: %(default)s"
    )
    parser.add_argument("--processes", type=int, choices=(1, 4), default=4, help="1: no parallelism: %(default)s")
    return parser
