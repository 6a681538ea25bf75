"""What goes into a checkpoint: parts of tensors that each rank has, and what Lightning and the hooks have collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.checkpoint.parts import Parts
from lightning_hybrid.parallel.checkpoint.saving import saved_groups
from lightning_hybrid.parallel.checkpoint.states import (
    MODEL,
    OPTIMIZER,
    Outline,
    gather_others,
    model_parts,
    optimizer_parts,
)
from lightning_hybrid.parallel.checkpoint.window import WINDOW
from lightning_hybrid.strategies.assembly import Assembly
from lightning_hybrid.strategies.resuming import ENTRY
from lightning_hybrid.strategies.windows import kept_window

KEY = "lightning_hybrid_key"  # attribute of a stand-in: the state key that it stands for


def looks_at_values(trainer: Trainer) -> bool:
    """Whether a hook is given a checkpoint to look at, and may want the numbers in it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    own = type(trainer.lightning_module).on_save_checkpoint is not LightningModule.on_save_checkpoint
    return own or any(type(callback).on_save_checkpoint is not Callback.on_save_checkpoint for callback in callbacks)


class StandIn:
    """Takes the place of a value that is no tensor."""


def stand_ins(outline: Outline) -> dict[str, Any]:
    """A model's state without numbers, for hooks that look at names; what they rename or delete is saved so."""
    state: dict[str, Any] = {}
    for key, shape in outline.shapes.items():
        state[key] = StandIn() if shape is None else torch.empty(shape[0], dtype=shape[1], device="meta")
        vars(state[key])[KEY] = key
    return state


@dataclass(frozen=True)
class Collected:
    """A checkpoint before it is written.

    Attributes:
        parts: This rank's of all tensors.
        rest: All else; complete on world rank 0 only.
        keys: Names under which tensors of the model's state are saved, in order.
        tied: First name of each whose tensor has another one before.
    """

    parts: Parts
    rest: dict[str, Any]
    keys: list[str]
    tied: dict[str, str]

    def filled(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The checkpoint as stock Lightning writes it.

        Args:
            tensors: All of them, or what stands for them, by their names in `parts`.
        """
        others, first = self.rest["state_dict"], {key: MODEL + self.tied.get(key, key) for key in self.keys}
        state = others | {key: tensors[first[key]] for key in self.keys if first[key] in tensors}
        ordered = dict.fromkeys([*(key for key in self.keys if key in state), *others])
        full = {**self.rest, "state_dict": {key: state[key] for key in ordered}}
        if "optimizer_states" in full:
            full["optimizer_states"] = filled_optimizers(self.rest["optimizer_states"], self.rest[ENTRY], tensors)
            window = {name: tensor for name, tensor in tensors.items() if name.startswith(WINDOW)}
            if window:
                full[ENTRY] = {**full[ENTRY], "gradients": window}
        return full


def filled_optimizers(
    saved: Sequence[Mapping[str, Any]], entry: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Optimizers' states in torch's form, by the numbers of parameters over the whole model.

    Args:
        saved: Of each optimizer, the values that are no tensors by parameter and entry, and the groups.
        entry: The checkpoint's, with the names of parameters.
        tensors: By their names in a checkpoint.
    """
    found: list[dict[str, Any]] = []
    for index, (state, groups) in enumerate(zip(saved, entry["optimizer_parameters"], strict=True)):
        entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in state["state"].items()}
        prefix = f"{OPTIMIZER}{index}."
        for name in (name for name in tensors if name.startswith(prefix)):
            parameter, _, value = name.removeprefix(prefix).rpartition(".")
            entries.setdefault(parameter, {})[value] = tensors[name]
        order = [name for group in groups for name in group]
        states = {i: entries[name] for i, name in enumerate(order) if name in entries}
        found.append({"state": states, "param_groups": state["param_groups"]})
    return found


def collect(assembly: Assembly, optimizers: Sequence[Optimizer], checkpoint: dict[str, Any]) -> Collected:
    """A checkpoint of what this rank has; every rank calls it.

    Args:
        assembly: What runs the model.
        optimizers: Of the run.
        checkpoint: What Lightning and the hooks have collected, with `stand_ins` for the model's state.

    Raises:
        RuntimeError: If a hook has kept a value of the state without numbers.
    """
    engine, outline = assembly.engine, assembly.outline
    assembly.make_whole()
    assembly.load_waiting()
    kept, added = _agreed(checkpoint)
    names: dict[str, str] = {}  # under which each tensor is saved
    for name, key in kept.items():
        names.setdefault(outline.first(key), name)
    firsts = {name: names[outline.first(key)] for name, key in kept.items()}
    found, model_others = model_parts(engine, outline)
    parts = {MODEL + names[key]: part for name, part in found.items() if (key := name.removeprefix(MODEL)) in names}
    mine: dict[Any, Any] = {("model", name): model_others[key] for name, key in kept.items() if key in model_others}
    if "optimizer_states" in checkpoint:
        for index, optimizer in enumerate(optimizers):
            more, others = optimizer_parts(engine, optimizer, index, outline)
            parts |= more
            mine |= {(index, name): values for name, values in others.items()}
        window, numbers = kept_window(engine, assembly.runner.window)
        parts |= window
    everyone = gather_others(engine, mine)
    rest = {**checkpoint, "state_dict": {**_others(everyone, "model"), **added}}
    if "optimizer_states" in checkpoint:
        groups = assembly.groups
        rest["optimizer_states"] = [
            {"state": _others(everyone, index), "param_groups": saved_groups(optimizer, names_of, given)}
            for index, (optimizer, names_of, given) in enumerate(
                zip(optimizers, groups.names, groups.given, strict=True) if groups is not None else ()
            )
        ]
        rest[ENTRY] = {**rest.get(ENTRY, {}), "window": numbers}
    tied = {name: first for name, first in firsts.items() if name != first}
    return Collected(parts, rest, list(kept), tied)


def _agreed(checkpoint: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Which state key each name of the state stands for after the hooks of rank 0, and what hooks have added."""
    state = checkpoint["state_dict"]
    kept = {name: vars(value)[KEY] for name, value in state.items() if KEY in getattr(value, "__dict__", ())}
    added = {name: value for name, value in state.items() if name not in kept}
    _refuse_meta({**checkpoint, "state_dict": added})
    box = [kept]
    dist.broadcast_object_list(box)  # as for a file, hooks of rank 0 may be the only ones
    return box[0], added


def _others(everyone: Mapping[Any, Any], kind: Any) -> dict[str, Any]:
    return {name: value for (of, name), value in everyone.items() if of == kind}


def _refuse_meta(checkpoint: Mapping[str, Any]) -> None:
    """Refuse what a hook has made of stand-ins."""
    for entry, values in checkpoint.items():
        if any(isinstance(leaf, StandIn) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves_of(values)):
            raise RuntimeError(
                f"checkpoint[{entry!r}] holds something made of values of checkpoint['state_dict'], which has names "
                "but no numbers while a checkpoint is collected: hooks may rename and delete them. Keep your own copy "
                "of the parameters in the module."
            )
