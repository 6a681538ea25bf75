"""The blocks that memory callbacks work with."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_hybrid.parallel.pipeline.blocks import block_names, find_block_lists


def choose_blocks(
    trainer: Trainer, pl_module: LightningModule, lists: str | Sequence[str] | None
) -> dict[str, nn.Module]:
    """Blocks by name, in order; call it from `on_fit_start` on, when the model is there.

    Args:
        trainer: Its strategy may have found them already, before it cut the model.
        pl_module: The model.
        lists: Dotted names of the lists whose elements they are; None finds the lists as a pipeline does.

    Raises:
        ValueError: If a name does not exist or names no list. An empty result means that the model has no such list.
    """
    found: Sequence[str] | None = getattr(trainer.strategy, "block_names", None)
    if lists is not None or found is None:
        found = block_names(pl_module, find_block_lists(pl_module, lists, argument="blocks"), shared=True)
    names: dict[nn.Module, str] = {}
    for name in found:
        names.setdefault(pl_module.get_submodule(name), name)  # a shared one by its first name
    return {name: module for module, name in names.items()}


def choose_groups(
    trainer: Trainer, pl_module: LightningModule, lists: str | Sequence[str] | None
) -> dict[str, nn.Module]:
    """Blocks as by :func:`choose_blocks`; in a model without lists its children."""
    return choose_blocks(trainer, pl_module, lists) or dict(pl_module.named_children())


def first_blocks(trainer: Trainer, names: Sequence[str]) -> set[int]:
    """Positions of blocks, the first apart, that no other of the same list and stage comes before."""
    lists: list[list[str]] | None = getattr(trainer.strategy, "block_runs", None)
    run_of = {name: number for number, run in enumerate(lists or []) for name in run}
    keys = [(name.rpartition(".")[0], run_of.get(name)) for name in names]
    return {index for index in range(1, len(names)) if keys[index] != keys[index - 1]}
