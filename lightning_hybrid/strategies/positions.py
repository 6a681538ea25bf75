"""Where training is in the data of an epoch, in samples of all replicas, and how it goes on there under any layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_hybrid.compat import loader_cycles
from lightning_hybrid.functional.orders import batches_after, batches_of_pass
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.strategies.orders import Batches, Order, Share, order_of

WARNING = "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable"


def is_stateful(loader: object) -> bool:
    """Whether Lightning saves and loads the loader's own state."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


@dataclass
class Place:
    """What a checkpoint says about the training data of one replica.

    Attributes:
        generators: States of the users' generators in loaders.
        positions: For each loader, what `Position.state` gave; None where it had no position.
        accumulate: Batches of an accumulation window.
        mid_epoch: Whether an epoch was under way.
    """

    generators: Sequence[Tensor] = ()
    positions: Sequence[Mapping[str, Any] | None] = ()
    accumulate: int = 1
    mid_epoch: bool = False


class Position:
    """Makes a `DataLoader` go on at a place in the order of all replicas; it stays the object that it was.

    Args:
        loader: One whose batches torch makes from a sampler; see `position_of`.
        order: Of its sampler.
        mesh: Groups of this rank.
        epoch: The one that is under way or about to begin.

    Attributes:
        batch: Samples of one batch over all replicas that share the order.
        number: Batches of the pass before those with which the data goes on.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, mesh: Mesh, *, epoch: int) -> None:
        sampler: Any = loader.sampler
        replicas = getattr(sampler, "num_replicas", 1)
        self.loader, self.order, self._mesh, self.number = loader, order, mesh, 0
        self._own, self._source = loader.batch_sampler, order.kind
        self._is_shared = replicas == mesh.layout.data
        assert loader.batch_size is not None
        self.batch = loader.batch_size * replicas
        share = Share(sampler, order, replicas, mesh.data_rank if replicas > 1 else 0)
        share.set_epoch(epoch)
        self.batches = Batches(share, loader.batch_size, loader.drop_last, ahead=loader.num_workers > 0)
        vars(loader)["batch_sampler"] = self.batches  # `DataLoader` refuses to have it set

    def release(self) -> None:
        """Give the user's loader its own batches back."""
        vars(self.loader)["batch_sampler"] = self._own

    def state(self, number: int, *, cycles: bool) -> dict[str, Any]:
        """What a checkpoint keeps, after `number` batches of the epoch."""
        return {
            "source": self._source,
            "kind": self.order.kind,
            "seed": self.order.seed,
            "drawn": self.order.drawn,
            "length": len(self.order.dataset),
            "batch": self.batch,
            "replicas": self._mesh.layout.data,
            "is_shared": self._is_shared,
            "has_generator": self.order.generator is not None,
            "batches": batches_of_pass(number, len(self.loader), cycles=cycles),
        }

    def resume(self, state: Mapping[str, Any], *, mid_epoch: bool) -> bool:
        """Take over the order of the run that goes on and, in the middle of an epoch, its place.

        Returns:
            Whether the data goes on there.

        Raises:
            RuntimeError: If the place is within one of the batches that the loader makes now.
        """
        if not self._same_order(state):
            return False
        self._adopt(state)
        if not mid_epoch or state["length"] != len(self.order.dataset):
            return False
        samples = state["batches"] * state["batch"]
        number = batches_after(samples, self.batch)
        if number is None:
            raise RuntimeError(
                f"The checkpoint was saved after {samples} samples of the epoch, in batches of {state['batch']} over "
                f"all replicas, and now they are of {self.batch}: {samples} is not a multiple of that. Choose a batch "
                f"size with which the batches of all {self._mesh.layout.data} replica(s) together have "
                f"{state['batch']} samples, or a divisor of {samples}, or resume from a checkpoint of the end of an "
                "epoch."
            )
        self.number = self.batches.position = number
        if self.order.kind == "drawn":
            self.order.resumed = state["drawn"]
        return True

    def _same_order(self, state: Mapping[str, Any]) -> bool:
        """Whether the loader is that of the checkpoint, as far as is known: Lightning shuffles for replicas only."""
        replicas = self._mesh.layout.data
        if state["is_shared"] != self._is_shared or (not self._is_shared and state["replicas"] != replicas):
            return False
        if state["has_generator"] and self.order.generator is None and self.loader.generator is None:
            return False
        is_alone = [number == 1 for number in (state["replicas"], replicas)]
        return is_alone[0] != is_alone[1] or (state["source"] == "sequential") == (self._source == "sequential")

    def _adopt(self, state: Mapping[str, Any]) -> None:
        order = self.order
        if state["kind"] == "drawn" and order.kind != "drawn":
            order.generator = self.loader.generator if state["has_generator"] else None
            order.mesh = self._mesh if self._mesh.layout.data > 1 and order.generator is None else None
        order.kind, order.seed = state["kind"], state["seed"]


def position_of(loader: object, mesh: Mesh, agreed_seed: int | None, *, epoch: int) -> Position | None:
    """The position of a training loader; None if it is of a kind that cannot be told to go on from a place."""
    if not isinstance(loader, DataLoader) or is_stateful(loader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or batches.sampler is not loader.sampler:
        return None
    order = order_of(loader.sampler, agreed_seed)
    place = (getattr(loader.sampler, "num_replicas", 1), getattr(loader.sampler, "rank", 0))
    if order is None or place not in ((1, 0), (mesh.layout.data, mesh.data_rank)):
        return None
    return Position(loader, order, mesh, epoch=epoch)


@dataclass
class Positions:
    """The positions of all training loaders, in Lightning's order; None for loaders without one.

    Attributes:
        place: Where the run that goes on was; consumed by the first loaders of a fit.
    """

    place: Place = field(default_factory=Place)
    _now: Place = field(default_factory=Place)
    _all: list[Position | None] = field(default_factory=list)
    _resumed: list[Position | None] = field(default_factory=list)
    _go_on: list[bool] = field(default_factory=list)
    _quiet: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Lightning asks for training loaders."""
        self.release()
        self._now, self.place = self.place, Place()
        self._all, self._resumed, self._go_on = [], [], []

    def add(self, loader: object, mesh: Mesh, agreed_seed: int | None, *, epoch: int) -> None:
        """Take the next loader, before anything draws from its generators.

        Args:
            loader: Anything that a loader may be.
            mesh: Groups of this rank.
            agreed_seed: From which the ranks of a replica draw its order; None where they draw from global streams.
            epoch: The one that is under way or about to begin.
        """
        position, number = position_of(loader, mesh, agreed_seed, epoch=epoch), len(self._all)
        state = self._now.positions[number] if number < len(self._now.positions) else None
        goes_on = False
        if position is not None and state is not None:
            goes_on = position.resume(state, mid_epoch=self._now.mid_epoch)
        self._all.append(position)
        self._resumed.append(position if goes_on else None)
        self._go_on.append(goes_on or is_stateful(loader))

    @property
    def are_known(self) -> bool:
        """Whether all loaders have one."""
        return bool(self._all) and all(each is not None for each in self._all)

    @property
    def follow_first(self) -> bool:
        """Whether orders are drawn from the first replica's global stream, as the run did from which this one goes on.

        All ranks must then draw from their streams what that run drew.
        """
        return any(each is not None and each.order.mesh is not None for each in self._all)

    def states(self, trainer: Trainer) -> list[dict[str, Any] | None]:
        """What a checkpoint keeps of each loader."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        cycles = loader_cycles(trainer)
        return [each.state(progress.processed, cycles=cycles) if each is not None else None for each in self._all]

    def settle(self, trainer: Trainer) -> bool:
        """Before the first batch: count the batches of the epoch as the loaders make them now.

        Returns:
            Whether the data of some loader goes on in the middle of an epoch.

        Raises:
            RuntimeError: If the data cannot go on there.
        """
        if not self._now.mid_epoch or not any(self._resumed):
            return False
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                callback.on_train_epoch_start(trainer)  # Lightning does not call it in the middle of an epoch
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        before = progress.current.processed
        now = self._batches(before)
        self._check_window(before, now, trainer.accumulate_grad_batches)
        if now >= trainer.num_training_batches:
            raise RuntimeError(
                f"The checkpoint was saved after {now} batches of an epoch that has {trainer.num_training_batches} "
                "now: there is nothing left to go on with. Resume with the same data and limit_train_batches, or from "
                "a checkpoint of the end of an epoch."
            )
        for counts in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counts, name, getattr(counts, name) + now - before)
        if all(self._go_on):
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=WARNING)
        return True

    def _batches(self, before: int) -> int:
        """Batches of the epoch so far, if all had been as large as they are now."""
        states = self._now.positions
        if len(states) != len(self._all):
            raise RuntimeError(
                f"The checkpoint was saved in the middle of an epoch over {len(states)} training loader(s), and "
                f"now there are {len(self._all)}. Resume with the same loaders, or from a checkpoint of the end of an "
                "epoch."
            )
        pairs = [(each, state) for each, state in zip(self._resumed, states, strict=True) if each and state]
        if len(states) == 1:
            return pairs[0][0].number
        for position, state in pairs:
            if position.batch != state["batch"]:
                raise RuntimeError(
                    f"The checkpoint was saved in the middle of an epoch over {len(states)} training loaders, one of "
                    f"which made batches of {state['batch']} samples over all replicas, and now of {position.batch}. "
                    "Choose batch sizes with which the batches of all replicas together stay as large."
                )
        return before

    def _check_window(self, before: int, now: int, accumulate: int) -> None:
        was = self._now.accumulate
        if before % was and (now != before or accumulate != was):
            raise RuntimeError(
                f"The checkpoint was saved after {before} batches, within an accumulation window of {was} batches. "
                f"There the samples of a batch over all replicas and accumulate_grad_batches must stay; now "
                f"{now} batches make up as many samples and accumulate_grad_batches is {accumulate}. Keep both, or "
                "resume from a checkpoint between two windows."
            )
        if before % was == 0 and now % accumulate:
            raise RuntimeError(
                f"The checkpoint was saved after what are now {now} batches of an epoch, which is not a multiple of "
                f"accumulate_grad_batches={accumulate}, so that the first window would be short. Choose a divisor of "
                f"{now}, or resume from a checkpoint of the end of an epoch."
            )

    def begin(self) -> None:
        """The first batch is there: Lightning has said what it had to say."""
        self._quiet.close()

    def release(self) -> None:
        """Give the users' loaders back as they were."""
        self._quiet.close()
        for position in self._all:
            if position is not None:
                position.release()
