"""One row of the parity table: a fit over a layout, and the fit in one process that it must equal."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid import HybridPTDPStrategy
from tests.parity_models import make, make_batch


class Layout(NamedTuple):
    """Sizes of the axes."""

    pipeline: int
    data: int
    chunks: int

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data


@dataclass(frozen=True)
class Case:
    """Data of a fit: the samples of each global batch, and what is done with them."""

    sizes: tuple[int, ...]
    micro_batches: int = 4
    accumulate: int = 1
    weighted: bool = False

    def batches(self, model: str) -> list[Any]:
        return [make_batch(model, self.weighted, size, seed) for seed, size in enumerate(self.sizes)]

    def windows(self) -> list[tuple[int, int]]:
        """First batch and end of each accumulation window."""
        return [(i, min(i + self.accumulate, len(self.sizes))) for i in range(0, len(self.sizes), self.accumulate)]


CASES = {
    "even": Case((8, 8, 8)),
    "short-batch": Case((8, 8, 5)),
    "uneven-micro": Case((7, 11, 7), micro_batches=3),
    "weighted": Case((8, 7, 5), weighted=True),
    "window": Case((8, 6, 6, 6, 5), accumulate=2),
    "weighted-window": Case((8, 6, 6, 7, 5), accumulate=2, weighted=True),
}


class Row(NamedTuple):
    """A fit over several processes."""

    model: str
    layout: Layout
    schedule: str
    zero_stage: int
    case: str

    @property
    def name(self) -> str:
        return f"{self.model}-{'x'.join(map(str, self.layout))}-{self.schedule}-zero{self.zero_stage}-{self.case}"


class Outcome(NamedTuple):
    """What a fit shows: for each batch every loss that a user sees, those of the epoch, and the weights on rank 0."""

    batches: list[dict[str, Tensor]]
    epoch: dict[str, Tensor]
    weights: dict[str, Tensor]


class Losses(Callback):
    """Keeps what `training_step` returned and what it logged.

    It clips the second step's gradients alone: the scale of clipped ones does not show in the weights.
    """

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        trainer.gradient_clip_val = 0.1 if trainer.global_step == 1 else 1e9

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.batches.append({"returned": outputs["loss"].clone(), **trainer.callback_metrics})


class Slices(LightningDataModule):
    """Gives each replica its part of every global batch."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        parts = [take(batch, place["rank"], place["num_replicas"]) for batch in self.batches]
        return DataLoader(parts, batch_size=None)


def take(batch: Any, part: int, parts: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.tensor_split(parts)[part]
    return {name: take(value, part, parts) for name, value in batch.items()}


def fit(model: LightningModule, batches: list[Any], **options: Any) -> Outcome:
    """Fit for one epoch in float64."""
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=1e9,
        callbacks=[losses],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, Slices(batches))
    weights = {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    return Outcome(losses.batches, dict(trainer.callback_metrics), weights)


def fit_row(row: Row) -> Outcome:
    """A row's fit, on every rank."""
    case, layout = CASES[row.case], row.layout
    strategy = HybridPTDPStrategy(
        pipeline_parallel_size=layout.pipeline,
        num_chunks=layout.chunks,
        num_microbatches=case.micro_batches,
        schedule=row.schedule,
        zero_stage=row.zero_stage,
    )
    return fit(
        make(row.model, case.weighted),
        case.batches(row.model),
        devices=layout.world_size,
        strategy=strategy,
        accumulate_grad_batches=case.accumulate,
    )
