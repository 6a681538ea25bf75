"""Saved activations in host memory until their backward pass needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Table
from torch import nn
from typing_extensions import override

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.blocks import choose_blocks
from lightning_hybrid.callbacks.memory_policy import MemoryTechnique
from lightning_hybrid.callbacks.reports import fail_together, show
from lightning_hybrid.functional.offloading import cheapest_offload
from lightning_hybrid.parallel.memory.offload import CONVOLUTIONS, Offload, Policy

MIN_BYTES = 2**20


class ActivationOffload(MemoryTechnique):
    """Moves what autograd saves to host memory, and back one block ahead of the backward pass; with any strategy.

    Gradients are bitwise those without it. A copy to host memory begins as soon as something is saved, from a stream of
    its own, and memory on the device is given up when the next block is done. So the device holds what two blocks have
    saved and what the code between them has. A storage is copied once, however many operations save it or views of it.
    Parameters and buffers stay, and validation is left alone. On the CPU memory is really given up and copied back,
    within the same memory: good for tests.

    Args:
        policy: "all" that is saved; what "blocks" save; or what convolutions save ("conv"), where the paper's policy of
            that name offloads the inputs of convolutional layers.
        budget_bytes: Most bytes that the device is to hold of what `policy` names. The first batch offloads all of it
            and measures; then the plan of `functional.offloading.cheapest_offload` moves the fewest bytes. Each rank
            makes one for itself. None offloads everything always. With ActivationRecompute or ActivationCompression in
            the Trainer one plan is made over all of them, of two steps, for all that a rank holds, whichever has the
            budget.
        blocks: Dotted names of the lists whose elements are the blocks; None finds them as a pipeline does. In a model
            without such lists the children of the module take their place, if `policy` is not "blocks".
        min_bytes: Storages with fewer bytes stay. A mebibyte crosses a bus of 25 GB/s in 40 microseconds, about as long
            as it takes to ask for a copy and to wait for it.

    Attributes:
        sizes: Bytes that a pass moves at most, by group: a block's name, or "(after NAME)" for the code that follows.
            What two groups save, as a block's input, counts for both.
        plan: With `budget_bytes`, from the second batch on: whether each group moves.

    Raises:
        ValueError: Before training, for what is refused; after the first batch on all ranks, if the budget of one is
            too small.

    Source: Rhu et al. 2016, arXiv:1602.08124 (vDNN), section III; the dynamic policy there profiles too, and chooses
    among whole policies.
    """

    def __init__(
        self,
        policy: Policy = "all",
        budget_bytes: int | None = None,
        blocks: str | Sequence[str] | None = None,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"policy={policy!r} is none of {list(get_args(Policy))}.")
        check_whole("min_bytes", min_bytes, 0, " of bytes")
        if budget_bytes is not None:
            check_whole("budget_bytes", budget_bytes, 0, " of bytes")
        self.policy, self.budget_bytes, self.blocks, self.min_bytes = policy, budget_bytes, blocks, min_bytes
        self.sizes: dict[str, int] = {}
        self.plan: dict[str, bool] | None = None
        self._offload: Offload | None = None
        self._has_warned = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        number = sum(isinstance(callback, ActivationOffload) for callback in callbacks)
        if number > 1:
            raise ValueError(f"The Trainer has {number} ActivationOffloads, and one takes all that is saved. Keep one.")
        if getattr(trainer.strategy, "zero_stage_3", False):
            raise ValueError(
                f"ActivationOffload cannot tell parameters from activations under stage 3 of "
                f"{type(trainer.strategy).__name__}, which swaps their memory. Use hybrid_zero3, or stage 2."
            )
        super().setup(trainer, pl_module, stage)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self.sizes, self.plan = {}, None
        blocks = self._groups(trainer, pl_module)
        self._offload = Offload(pl_module, blocks, trainer.strategy.root_device, self.policy, self.min_bytes)
        super().on_fit_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._offload is not None
        self._offload.start()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._offload is not None
        self._offload.stop()
        self.sizes = self._offload.sizes
        if not self.sizes and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"ActivationOffload moves nothing: with policy={self.policy!r} the first batch saved no storage of "
                f"min_bytes={self.min_bytes} or more that can move. Lower min_bytes, or leave the callback out."
            )
        if self.budget_bytes is not None and self.plan is None and self.joint is None:
            self._make_plan(self._offload, self.budget_bytes)
            show(trainer, self.table())
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._offload is not None
        self._offload.stop()  # a hook may have skipped the rest of the epoch in the middle of a batch
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def leave_batch(self, trainer: Trainer) -> None:
        assert self._offload is not None
        self._offload.stop()
        super().leave_batch(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._close()

    @property
    @override
    def runtime(self) -> Offload:
        assert self._offload is not None
        return self._offload

    def table(self) -> Table:
        """What the first batch moved on this rank, by group, and what the plan moves since."""
        chosen = self.plan or {}
        plan = [(name, size, chosen.get(name, True)) for name, size in self.sizes.items()]
        table = Table(title=f"Activations of this rank, bytes of a pass, budget {self.budget_bytes or 0:,}")
        for name in ("group", "offloaded", "kept"):
            table.add_column(name, justify="left" if name == "group" else "right")
        for name, size, moves in plan:
            table.add_row(name, *(("", f"{size:,}") if not moves else (f"{size:,}", "")))
        table.add_section()
        table.add_row(
            "total", *(f"{sum(size for _, size, moves in plan if moves is kind):,}" for kind in (True, False))
        )
        return table

    def _groups(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, nn.Module]:
        blocks = choose_blocks(trainer, pl_module, self.blocks)
        if not blocks and self.policy == "blocks":
            raise ValueError(
                f"policy='blocks': {type(pl_module).__name__} has no list of blocks. Name lists by blocks=[...], or "
                "choose policy='all'."
            )
        if self.policy == "conv" and not any(isinstance(module, CONVOLUTIONS) for module in pl_module.modules()):
            raise ValueError(f"policy='conv': {type(pl_module).__name__} has no convolution. Choose 'all' or 'blocks'.")
        return blocks or dict(pl_module.named_children())

    def _make_plan(self, offload: Offload, budget_bytes: int) -> None:
        """Choose the groups that move from the next batch on; the ranks fail together."""
        error, units = "", _units(offload.sizes)
        try:
            moves = cheapest_offload([sum(unit.values()) for unit in units], budget_bytes, max(1, offload.in_flight))
            chosen = zip(units, moves, strict=True)
            self.plan = offload.plan = {name: moves for unit, moves in chosen for name in unit}
        except ValueError as found:
            error = str(found)
        fail_together(error and f"ActivationOffload: {error}")

    def _close(self) -> None:
        if self._offload is not None:
            self._offload.close()
            self._offload = None


def _units(sizes: dict[str, int]) -> list[dict[str, int]]:
    """What moves or stays together: code between two blocks goes with the first of them."""
    units: list[dict[str, int]] = []
    last_block = max((i for i, name in enumerate(sizes) if not name.startswith("(")), default=0)
    for position, (name, size) in enumerate(sizes.items()):
        if units and name.startswith("(") and position < last_block:
            units[-1][name] = size
        else:
            units.append({name: size})
    return units
