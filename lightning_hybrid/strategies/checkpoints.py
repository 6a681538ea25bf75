"""Checkpoints of a run: files or folders, written at once or in the background, and read by every rank in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.background import Background, HostCopies
from lightning_hybrid.parallel.checkpoint.manifest import Manifest
from lightning_hybrid.parallel.checkpoint.parts import Parts
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.checkpoint.saving import saved_groups
from lightning_hybrid.parallel.checkpoint.sharded import save_sharded
from lightning_hybrid.parallel.checkpoint.states import MODEL, Outline, gather_others, model_parts, optimizer_parts
from lightning_hybrid.parallel.checkpoint.stored import StoredOptimizer, StoredState
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.strategies.assembly import STORED, Assembly


class Checkpoints:
    """What a strategy needs to save and load.

    Args:
        timeout: Longest wait of a collective.
        background: Training goes on while a folder is written.

    Attributes:
        in_background: Training goes on while a checkpoint is written.
        is_dumping: Lightning collects what a checkpoint is going to hold.
    """

    def __init__(self, timeout: timedelta | None, *, background: bool) -> None:
        self._timeout, self.in_background = timeout, background
        self._background, self._copies = Background(), HostCopies()
        self._group: dist.ProcessGroup | None = None
        self.is_dumping = False

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Context in which Lightning collects a checkpoint."""
        self.is_dumping = True
        try:
            yield
        finally:
            self.is_dumping = False

    def save_folder(
        self, assembly: Assembly, optimizers: Sequence[Optimizer], checkpoint: dict[str, Any], path: Any, *, wait: bool
    ) -> None:
        """Write a checkpoint as a folder; every rank calls it.

        Args:
            assembly: What runs the model.
            optimizers: Of the run.
            checkpoint: What Lightning and the hooks have collected, with `stand_ins` for the model's state.
            path: The folder.
            wait: Return when it is complete.
        """
        if "://" in str(path):
            raise ValueError(
                f"state_dict_type='sharded' writes folders of a file system that all ranks share, got {path}. Give a "
                "path without a protocol, or set state_dict_type='full'."
            )
        engine, outline = assembly.engine, assembly.outline
        parts, others = collect(assembly, optimizers, checkpoint)
        about = Manifest(
            "",
            {},
            layout=assembly.layout(),
            epoch=checkpoint.get("epoch", 0),
            global_step=checkpoint.get("global_step", 0),
            tied={MODEL + key: MODEL + first for key, first in outline.tied.items()},
        )
        self.run(lambda parts, group: save_sharded(path, parts, others, about, group), parts, engine, wait=wait)

    def run(
        self, write: Callable[[Parts, dist.ProcessGroup | None], None], parts: Parts, engine: Engine, *, wait: bool
    ) -> None:
        """Write parts now, or copies of them in the background.

        Args:
            write: Writes them over a group of host memory.
            parts: What this rank has.
            engine: This rank's engine.
            wait: Return when all is written.
        """
        self._background.wait()
        group = self._host_group()
        if wait or not self.in_background:
            write(parts, group)
            return
        copies = self._copies.take(parts)
        if engine.mesh.device.type == "cuda":
            torch.cuda.synchronize(engine.mesh.device)
        self._background.start(lambda: write(copies, group))

    def remove(self, path: Any, otherwise: Callable[[], None]) -> None:
        """Remove a checkpoint, but not before the one that is being written is complete.

        Args:
            path: The checkpoint; a link is removed as such.
            otherwise: Removes what is no folder of ours.
        """
        folder = Path(path)
        ours = "://" not in str(path) and not folder.is_symlink() and (folder / folders.FILE).exists()
        self._background.then((lambda: folders.remove(folder)) if ours else otherwise)

    def check(self) -> None:
        """Raise the error of a save in the background that has failed."""
        self._background.check()

    def wait(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        self._background.wait()

    def end(self, error: BaseException | None) -> None:
        """Wait at the end of a run, which may have failed for another reason."""
        try:
            self._background.wait()
        except Exception as late:
            if error is None:
                raise
            rank_zero_warn(f"A checkpoint was not saved either: {late}")

    def _host_group(self) -> dist.ProcessGroup | None:
        """A group that a thread may use while training communicates, in host memory."""
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="checkpoint")
        return self._group


def stand_ins(outline: Outline) -> dict[str, Any]:
    """A model's state without numbers, for hooks that look at names; what they delete is not saved."""
    return {
        key: None if shape is None else torch.empty(shape[0], dtype=shape[1], device="meta")
        for key, shape in outline.shapes.items()
    }


def collect(
    assembly: Assembly, optimizers: Sequence[Optimizer], checkpoint: dict[str, Any]
) -> tuple[Parts, dict[str, Any]]:
    """This rank's parts of a checkpoint, and on rank 0 all else.

    Raises:
        RuntimeError: If a hook has kept a value of the state without numbers.
    """
    engine, outline = assembly.engine, assembly.outline
    assembly.make_whole()
    state = checkpoint["state_dict"]
    kept = {key for key, value in state.items() if value is None or (isinstance(value, Tensor) and value.is_meta)}
    _refuse_meta({key: value for key, value in checkpoint.items() if key != "state_dict"})
    found, model_others = model_parts(engine, outline)
    names = {MODEL + outline.first(key) for key in kept}
    parts = {name: part for name, part in found.items() if name in names}
    mine: dict[Any, Any] = {("model", key): value for key, value in model_others.items() if key in kept}
    if "optimizer_states" in checkpoint:
        for index, optimizer in enumerate(optimizers):
            more, others = optimizer_parts(engine, optimizer, index, outline)
            parts |= more
            mine |= {(index, name): values for name, values in others.items()}
    everyone = gather_others(engine, mine)
    added = {key: value for key, value in state.items() if key not in kept}
    rest = {**checkpoint, "state_dict": {**_others(everyone, "model"), **added}}
    if "optimizer_states" in checkpoint:
        assert assembly.groups is not None
        rest["optimizer_states"] = [
            {"state": _others(everyone, index), "param_groups": saved_groups(optimizer, names_of, given)}
            for index, (optimizer, names_of, given) in enumerate(
                zip(optimizers, assembly.groups.names, assembly.groups.given, strict=True)
            )
        ]
    return parts, rest


def _others(everyone: Mapping[Any, Any], kind: Any) -> dict[str, Any]:
    return {name: value for (of, name), value in everyone.items() if of == kind}


def _refuse_meta(checkpoint: Mapping[str, Any]) -> None:
    for entry, values in checkpoint.items():
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves_of(values)):
            raise RuntimeError(
                f"checkpoint[{entry!r}] holds values of checkpoint['state_dict'], which has names but no numbers while "
                "a checkpoint is collected with state_dict_type='sharded'. Keep your own copy of the parameters in "
                "the module, or set state_dict_type='full'."
            )


def load_folder(path: Any, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder as Lightning expects a checkpoint, with a state of which tensors are read when they are needed."""
    reader = FolderReader(path)
    checkpoint = reader.training(weights_only=weights_only)
    tied = {key.removeprefix(MODEL): first.removeprefix(MODEL) for key, first in reader.manifest.tied.items()}
    checkpoint["state_dict"] = StoredState(reader, tied, checkpoint["state_dict"])
    states = checkpoint.get("optimizer_states")
    if states is not None:
        checkpoint[STORED] = [StoredOptimizer(reader, i, saved["state"]) for i, saved in enumerate(states)]
    return checkpoint


def refuse_links(trainer: Trainer) -> None:
    """Refuse a link to a checkpoint that is not complete when the link is made.

    Raises:
        ValueError: Naming the keyword.
    """
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                "ModelCheckpoint(save_last='link') with async_save=True would link to a checkpoint that is still being "
                "written. Set save_last=True, or async_save=False."
            )
