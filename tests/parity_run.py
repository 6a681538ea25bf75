"""One row of the parity table: a fit over several processes, and the fit in one process that it must equal."""

import gc
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid import HybridPTDPStrategy
from tests.parity_batches import make_batch, weight_of
from tests.parity_models import make


class Layout(NamedTuple):
    """How a model is spread."""

    pipeline: int
    data: int
    chunks: int
    tensor: int = 1
    replicate: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def __str__(self) -> str:
        sizes = f"{self.pipeline}x{self.data}x{self.chunks}"
        copies = f"-copies{self.replicate}" if self.replicate > 1 else ""
        return f"{sizes}{copies}" if self.tensor == 1 else f"{sizes}{copies}-tensor{self.tensor}"


@dataclass(frozen=True)
class Case:
    """Data of a fit, three steps of it: samples of each batch over all replicas, and what is done with them."""

    sizes: tuple[int, ...]
    micro_batches: int = 4
    accumulate: int = 1
    weighted: bool = False

    def batches(self, model: str) -> list[Any]:
        return [make_batch(model, self.weighted, size, seed) for seed, size in enumerate(self.sizes)]

    def windows(self, items: list[Any]) -> list[list[Any]]:
        """What belongs to each optimizer step."""
        return [items[first : first + self.accumulate] for first in range(0, len(items), self.accumulate)]


CASES = {
    "even": Case((8, 8, 8)),
    "short-batch": Case((8, 8, 5)),
    "uneven-micro": Case((7, 11, 7), micro_batches=3),
    "one-micro": Case((8, 7, 8), micro_batches=1),
    "weighted": Case((8, 7, 5), weighted=True),
    "window": Case((8, 6, 6, 6, 5), micro_batches=2, accumulate=2),
    "long-window": Case((8, 6, 6, 6, 5, 8, 7), micro_batches=2, accumulate=3),
    "weighted-window": Case((8, 6, 6, 7, 5), micro_batches=3, accumulate=2, weighted=True),
}


class Row(NamedTuple):
    """A fit over several processes."""

    model: str
    layout: Layout
    schedule: str
    zero_stage: int
    case: str
    sequence: bool | Literal["regather"] = False

    def __str__(self) -> str:
        name = f"{self.model}-{self.layout}-{self.schedule}-zero{self.zero_stage}-{self.case}"
        return f"{name}-{SEQUENCE[self.sequence]}" if self.sequence else name


SEQUENCE = {True: "sequence", "regather": "regather"}  # how names of rows show that keyword


class Outcome(NamedTuple):
    """What a rank sees of a fit.

    Attributes:
        losses: For each batch (or step, see `by_step`), what `training_step` returned and what it logged.
        epoch: What it logged, over the epoch.
        weights: The whole model's state, on rank 0.
    """

    losses: list[dict[str, Tensor]]
    epoch: dict[str, Tensor]
    weights: dict[str, Tensor]


class Observer(Callback):
    """Keeps the losses, and lets only the second step clip, because clipped gradients do not show a wrong scale."""

    def __init__(self) -> None:
        self.losses: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        trainer.gradient_clip_val = 0.1 if trainer.global_step == 1 else 1e9

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append({"returned": outputs["loss"].clone(), **trainer.callback_metrics})


class Slices(LightningDataModule):
    """Gives each replica its part of every batch."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return DataLoader([take(batch, **place) for batch in self.batches], batch_size=None)


def take(batch: Any, rank: int, num_replicas: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.tensor_split(num_replicas)[rank]
    return {name: take(value, rank, num_replicas) for name, value in batch.items()}


def join(batches: list[Any]) -> Any:
    if isinstance(batches[0], Tensor):
        return torch.cat(batches)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def fit(model: LightningModule, batches: list[Any], **options: Any) -> Outcome:
    """Fit for one epoch in float64."""
    observer = Observer()
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[observer],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, Slices(batches))
    assert trainer.global_step == 3
    epoch = {name: value for name, value in trainer.callback_metrics.items() if name.endswith("_epoch")}
    return Outcome(observer.losses, epoch, trainer.strategy.lightning_module_state_dict())


def fit_rows(rows: list[Row]) -> list[Outcome]:
    """Fit one row after the other; every rank calls it."""
    gc.freeze()  # a probe looks through all objects: not also through those of the modules loaded before
    return [_fit_row(row) for row in rows]


def _fit_row(row: Row) -> Outcome:
    case, layout = CASES[row.case], row.layout
    strategy = HybridPTDPStrategy(
        pipeline_parallel_size=layout.pipeline,
        num_chunks=layout.chunks,
        num_microbatches=case.micro_batches,
        schedule=row.schedule,
        zero_stage=row.zero_stage,
        replicate_size=layout.replicate,
        tensor_parallel_size=layout.tensor,
        sequence_parallel=row.sequence,
    )
    return fit(
        make(row.model, case.weighted),
        case.batches(row.model),
        devices=layout.world_size,
        strategy=strategy,
        accumulate_grad_batches=case.accumulate,
    )


@cache
def reference(model: str, case_name: str) -> Outcome:
    """Plain Lightning in one process; with weights, which it does not know, each window is made one big batch."""
    case = CASES[case_name]
    batches, accumulate = case.batches(model), case.accumulate
    if case.weighted:
        batches, accumulate = [join(window) for window in case.windows(batches)], 1
    return fit(make(model, case.weighted), batches, devices=1, accumulate_grad_batches=accumulate)


def by_step(outcome: Outcome, row: Row) -> Outcome:
    """With weights, combine the losses of each window into those of one big batch."""
    case = CASES[row.case]
    if not case.weighted:
        return outcome
    windows = zip(case.windows(outcome.losses), case.windows(case.batches(row.model)), strict=True)
    losses = [_weighted_mean(losses, [weight_of(batch) for batch in batches], case) for losses, batches in windows]
    return outcome._replace(losses=losses)


def _weighted_mean(losses: list[dict[str, Tensor]], weights: list[int], case: Case) -> dict[str, Tensor]:
    total = sum(weights)
    mean = {name: sum(n * loss[name] for n, loss in zip(weights, losses, strict=True)) / total for name in losses[0]}
    return mean | {"returned": mean["returned"] * case.accumulate}  # Lightning has divided what it passes on by that
