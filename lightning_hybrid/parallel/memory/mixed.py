"""One plan over recomputation, offloading and compression: what is measured for it, and what it says of a tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from lightning_hybrid.functional.mixing_plan import Way
from lightning_hybrid.parallel.memory.costs import CostMeter
from lightning_hybrid.parallel.memory.frames import Frame
from lightning_hybrid.parallel.memory.inputs import Arguments
from lightning_hybrid.parallel.memory.keys import Key, Met, SavedKeys
from lightning_hybrid.parallel.memory.mixed_items import Item, Measured, measured_pass
from lightning_hybrid.parallel.memory.offload_copies import Copies

COPIED_BYTES = 2**24
NUM_COPIES = 5


@dataclass
class _Use:
    """What was seen of a storage."""

    savers: set[str] = field(default_factory=set)
    moves_as_argument: bool = True
    moves_as_saved: bool = False

    @property
    def can_move(self) -> bool:
        """What one operation moves, it moves for all; what is kept for a repetition must move by itself."""
        return self.moves_as_argument and (self.moves_as_saved or not self.savers)


class MixMeter:
    """Measures steps in which all blocks are recomputed, if there is recomputation.

    Args:
        keys: Tells storages apart.
        costs: Measures blocks; None without recomputation.
        names: Of the blocks, in the order in which `costs` numbers them.
        can_move: Whether a tensor that is being saved may go to host memory.

    Attributes:
        measured: Of the passes that have ended.
    """

    def __init__(
        self,
        keys: SavedKeys,
        costs: CostMeter | None,
        names: Sequence[str],
        can_move: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._keys, self._costs, self._names, self._can_move = keys, costs, list(names), can_move
        self._uses: dict[int, _Use] = {}
        self.measured = Measured()
        keys.observer = self._pass_ended

    def start(self) -> None:
        """A new step."""
        if self._costs is not None:
            self._costs.start()

    def finish(self, in_flight: int, copy_seconds: float) -> Measured:
        """End the measurement; a step has ended.

        Args:
            in_flight: Most passes at once, as others have counted them.
            copy_seconds: Time in which a byte goes to host memory and comes back.
        """
        self._keys.observer = None
        result, costs = self.measured, self._costs
        result.in_flight, result.copy_seconds = max(1, in_flight), copy_seconds
        if costs is not None:
            result.in_flight = max(result.in_flight, costs.in_flight)
            result.seconds = {
                name: cost.seconds for name, cost in zip(self._names, costs.costs, strict=True) if cost is not None
            }
        return result

    def asked(self, tensor: Tensor) -> bool:
        """Outer hooks ask about a tensor: one that code outside of recomputed blocks saves, or an argument of one."""
        is_argument = self._costs is not None and self._keys.group in self._names
        self._note(tensor, by_operation=not is_argument)
        return True

    @contextmanager
    def watch(self, position: int, arguments: Arguments, frame: Frame) -> Iterator[Callable[[Tensor], object]]:
        """See `recompute.CallObserver`."""
        assert self._costs is not None
        with self._costs.watch(position, arguments, frame) as seen:

            def note(tensor: Tensor) -> None:
                seen(tensor)
                self._note(tensor, by_operation=True)

            yield note

    def _note(self, tensor: Tensor, *, by_operation: bool) -> None:
        met = self._keys.saved(tensor)
        if met is None:
            return
        use = self._uses.setdefault(id(met), _Use())
        if by_operation:
            use.savers.add(self._keys.group)
            use.moves_as_saved |= self._can_move(tensor)
        else:
            use.moves_as_argument &= self._can_move(tensor)

    def _pass_ended(self, met: list[Met], called: list[str]) -> None:
        uses = [(storage, self._uses.get(id(storage), _Use())) for storage in met]
        found = [
            (storage, Item(storage.num_bytes, can_move=use.can_move), use.savers)
            for storage, use in uses
            if use.savers or self._costs is not None
        ]
        self.measured.add(measured_pass(found, called))
        self._uses.clear()


class MixedChoice:
    """What a plan says of each tensor that is being saved.

    Args:
        keys: Tells storages apart.
        ways: The plan. What it does not know goes any way that there is.
    """

    def __init__(self, keys: SavedKeys, ways: dict[Key, Way]) -> None:
        self._keys, self._ways = keys, ways

    def way(self, tensor: Tensor) -> Way | None:
        """What becomes of a tensor; None if the plan does not know it."""
        met = self._keys.saved(tensor)
        found = (self._ways.get(key) for key in (met.keys if met is not None else ()))
        return next((way for way in found if way is not None), None)

    def offloads(self, tensor: Tensor) -> bool:
        """Whether it goes to host memory if it can."""
        return self.way(tensor) in ("offloaded", None)

    def compresses(self, tensor: Tensor) -> bool:
        """Whether it is compressed if it can be."""
        return self.way(tensor) in ("compressed", None)


def seconds_to_copy(device: torch.device) -> float:
    """Time in which a byte goes from a device to host memory and comes back: the median of some copies of 16 MiB."""
    copies, source, times = Copies(device), torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device), list[float]()
    for _ in range(NUM_COPIES):
        _synchronize(device)
        start = time.perf_counter()
        buffer, done = copies.to_host(source)
        copies.wait(done)
        _, done = copies.to_device(buffer)
        copies.wait(done)
        _synchronize(device)
        times.append(time.perf_counter() - start)
        copies.pool.give_back(buffer)
    return median(times) / COPIED_BYTES


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
