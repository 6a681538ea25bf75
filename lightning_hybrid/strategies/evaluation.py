"""Validation, test and prediction: loaders on which all ranks agree, and batches that count."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.streams import derived_seed
from lightning_hybrid.strategies.assembly import Assembly
from lightning_hybrid.strategies.loaders import EvenLoader, agree_on_order, own_generators, remove_padding, seed_workers
from lightning_hybrid.strategies.positions import Place, Positions
from lightning_hybrid.strategies.predictions import WritersOfRankZero, tell_writers

EVALUATIONS = ("val", "test", "predict")


def next_epoch(trainer: Trainer) -> int:
    """Number of the training epoch that is under way or about to begin, also right after a checkpoint was loaded."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)


class DataLoaders:
    """Loaders of all stages, as Lightning asks for them: a barrier names the kind, then each loader passes through.

    Attributes:
        positions: Where training is in its data.
    """

    def __init__(self) -> None:
        self.positions = Positions()
        self._kind = ""
        self._loaders: dict[str, list[object]] = {}
        self._steps: Counter[tuple[str, int]] = Counter()
        self._generators: list[torch.Generator] = []  # of the users' training loaders
        self._resumed: list[Tensor] = []
        self._restored: list[tuple[torch.Generator, Tensor]] = []

    def announce(self, name: str | None) -> None:
        """Take note of the barrier that Lightning enters before it prepares the loaders of one kind."""
        if name and name.endswith("_dataloader()"):
            self._kind = name.removesuffix("_dataloader()")
            self._loaders[self._kind] = []
            if self._kind == "train":
                self._generators, self._restored = [], []
                self.positions.start()

    def process(self, loader: object, mesh: Mesh, seed: int, *, epoch: int) -> object:
        """Make one loader agree over the ranks of a replica and, in evaluation, count each sample once.

        Args:
            loader: What the user's hook returned, with the sampler that Lightning has put into it.
            mesh: Groups of this rank.
            seed: Base of all seeds.
            epoch: Number of the training epoch that is under way or about to begin.
        """
        agreed = mesh.layout.data == 1 and "PL_GLOBAL_SEED" in os.environ  # all ranks draw alike, as one process does
        agreed_seed = None
        if mesh.layout.replica > 1 and not agreed:
            number = len(self._loaders.get(self._kind, []))
            agreed_seed = derived_seed(seed, self._kind, number, mesh.data_rank)
        if self._kind == "train":
            self._resume_generators(own_generators(loader))
            self.positions.add(loader, mesh, agreed_seed, epoch=epoch)
        seed_workers(loader, mesh.data_rank)
        if agreed_seed is not None and not self.positions.follow_first:
            agree_on_order(loader, agreed_seed, epoch=epoch)
        elif self._kind == "train" and hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # workers fetch before Lightning says so
        if self._kind in EVALUATIONS and mesh.layout.data > 1:
            remove_padding(getattr(loader, "sampler", None))
            loader = EvenLoader(loader, mesh)
        self._loaders.setdefault(self._kind, []).append(loader)
        return loader

    def training_state(self, trainer: Trainer) -> dict[str, Any]:
        """What a checkpoint keeps of this replica's training loaders, as tensors and numbers."""
        return {
            "generators": [generator.get_state() for generator in self._generators],
            "positions": self.positions.states(trainer),
            "accumulate": trainer.accumulate_grad_batches,
        }

    def resume(self, place: Place) -> None:
        """Let the training loaders go on from there once they exist."""
        self._resumed, self.positions.place = list(place.generators), place

    def _resume_generators(self, generators: list[torch.Generator]) -> None:
        for generator in generators:
            if self._resumed:
                self._restored.append((generator, self._resumed.pop(0)))
                generator.set_state(self._restored[-1][1])
            self._generators.append(generator)

    def go_on(self, trainer: Trainer) -> None:
        """Before the first batch of a fit: in the middle of an epoch, all is as it was behind the last batch."""
        if self.positions.settle(trainer):
            for generator, state in self._restored:  # a seed for workers has been drawn, as at the start of an epoch
                generator.set_state(state)

    def start(self, kind: str) -> None:
        """An evaluation begins."""
        for key in [key for key in self._steps if key[0] == kind]:
            del self._steps[key]

    def next_counts(self, kind: str, loader: int) -> bool:
        """Whether the next batch of a loader is one of the replica's own."""
        index = self._steps[kind, loader]
        self._steps[kind, loader] += 1
        loaders = self._loaders.get(kind, [])
        even = loaders[loader] if loader < len(loaders) else None
        return index < even.num_real if isinstance(even, EvenLoader) else True

    def seen_indices(self, kind: str, loader: int) -> list[int] | None:
        """Numbers in the dataset of the samples of the batch that `next_counts` counted, if Lightning notes them."""
        loaders, index = self._loaders.get(kind, []), self._steps[kind, loader] - 1
        sampler = getattr(loaders[loader], "batch_sampler", None) if loader < len(loaders) else None
        seen = getattr(sampler, "seen_batch_indices", None)
        if not seen or index >= len(seen) or not all(hasattr(number, "__index__") for number in seen[index]):
            return None
        return [int(number) for number in seen[index]]  # NumPy's and torch's whole numbers too


KINDS = {"validation_step": "val", "test_step": "test", "predict_step": "predict"}


class Evaluation:
    """Runs evaluation batches.

    Attributes:
        loaders: Those of all stages.
    """

    def __init__(self) -> None:
        self.loaders = DataLoaders()
        self._writers = WritersOfRankZero()

    def start(self, hook: str, assembly: Assembly) -> None:
        """An evaluation begins."""
        self.loaders.start(KINDS[hook])
        is_regular = hook != "predict_step" or assembly.engine.cut is not None  # else it may generate, say
        assembly.engine.prepare_evaluation(is_regular=is_regular)
        if hook == "predict_step":
            self._writers.silence(assembly.module.trainer)

    def restore(self) -> None:
        """The Trainer tears down."""
        self._writers.restore()
        self.loaders.positions.release()

    def step(
        self, hook: str, assembly: Assembly, precision: Precision, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One batch of validation or test."""
        args = (*args, *kwargs.values())
        context = precision.val_step_context if hook == "validation_step" else precision.test_step_context
        counts = self.loaders.next_counts(KINDS[hook], _loader_of(args))
        return assembly.runner.evaluate(hook, args, context, name=args[1:], counts=counts)

    def predict(self, assembly: Assembly, precision: Precision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One batch of predictions, of all replicas."""
        args = (*args, *kwargs.values())
        loader = _loader_of(args)
        value, indices = assembly.runner.predict(
            args,
            precision.predict_step_context,
            name=args[1:],
            counts=self.loaders.next_counts("predict", loader),
            indices=self.loaders.seen_indices("predict", loader),
        )
        tell_writers(assembly.module.trainer, indices, loader)
        return value


def _loader_of(args: tuple[Any, ...]) -> int:
    """Number of the loader that a step's arguments (batch, batch_idx, dataloader_idx) name."""
    return args[2] if len(args) > 2 else 0
