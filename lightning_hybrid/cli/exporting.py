"""One file out of a checkpoint, written tensor by tensor in little memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_hybrid.cli.opened import Opened, OpenedFile
from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.hollow_safetensors import HollowSafetensors
from lightning_hybrid.parallel.checkpoint.hollow_torch import HollowCheckpoint, placeholder
from lightning_hybrid.parallel.checkpoint.states import MODEL
from lightning_hybrid.parallel.checkpoint.window import WINDOW
from lightning_hybrid.strategies.collecting import filled_optimizers
from lightning_hybrid.strategies.resuming import ENTRY

KEPT = ("epoch", "global_step", "pytorch-lightning_version", "hparams_name", "hparams_type", "hyper_parameters")
DATAMODULE = "datamodule_"  # how Lightning's names of a data module's hyper-parameters begin

Advance = Callable[[int], object]  # told of bytes that were written


def export_checkpoint(opened: Opened, out: Path, advance: Advance, *, weights_only: bool) -> None:
    """Write one file that any strategy loads.

    Args:
        opened: The checkpoint.
        out: The file.
        advance: Told of progress.
        weights_only: Keep the module's state and hyper-parameters.

    Raises:
        ValueError: If it would be what it was.
        RuntimeError: If the checkpoint is damaged.
        OSError: If the file cannot be written.
    """
    if isinstance(opened, OpenedFile) and not weights_only:
        raise ValueError(f"{opened.path} is one file already. Copy it, or add --weights-only.")
    names = [name for name in opened.tensors if name.startswith(MODEL) or not weights_only]
    places = {name: placeholder(*opened.tensors[name]) for name in names}
    with HollowCheckpoint(out, _checkpoint(opened, places, weights_only=weights_only)) as file:
        for name, place in places.items():
            for box, data in opened.parts(name):
                file.write(place, box, data)
                advance(data.nbytes)


def export_safetensors(opened: Opened, out: Path, advance: Advance) -> list[str]:
    """Write the module's tensors under its names; of tied ones the first, and the others in the file's metadata.

    The metadata is as `safetensors.torch.save_model` writes it: first name by second name.

    Returns:
        Entries of the state that are no tensors, and so are left out.

    Raises:
        ValueError: If the format has no such type.
        RuntimeError: If the checkpoint is damaged.
        OSError: If the file cannot be written.
    """
    tensors = {name: spec for name, spec in opened.tensors.items() if name.startswith(MODEL)}
    tied = {second.removeprefix(MODEL): first.removeprefix(MODEL) for second, first in opened.tied.items()}
    plain = {name.removeprefix(MODEL): spec for name, spec in tensors.items()}
    with HollowSafetensors(out, plain, {"format": "pt", **tied}) as file:
        for name in tensors:
            for box, data in opened.parts(name):
                file.write(name.removeprefix(MODEL), box, data)
                advance(data.nbytes)
    return list(opened.training()["state_dict"])


def _checkpoint(opened: Opened, places: Mapping[str, Tensor], *, weights_only: bool) -> dict[str, Any]:
    training = opened.training()
    state = {name.removeprefix(MODEL): place for name, place in places.items() if name.startswith(MODEL)}
    state |= {second.removeprefix(MODEL): places[first] for second, first in opened.tied.items() if first in places}
    state |= training["state_dict"]
    if weights_only:
        kept = {key: value for key, value in training.items() if key in KEPT or key.startswith(DATAMODULE)}
        return {**kept, "state_dict": state}
    if "optimizer_states" not in training:
        return {**training, "state_dict": state}
    entry = training[ENTRY]
    window = {name: place for name, place in places.items() if name.startswith(WINDOW)}
    return {
        **training,
        "state_dict": state,
        "optimizer_states": filled_optimizers(training["optimizer_states"], entry, places),
        ENTRY: {**entry, "gradients": window} if window else entry,
    }


def bytes_of(opened: Opened, *, model_only: bool) -> int:
    """How much an export writes."""
    return sum(
        Box.of(shape).numel * dtype.itemsize
        for name, (shape, dtype) in opened.tensors.items()
        if name.startswith(MODEL) or not model_only
    )
