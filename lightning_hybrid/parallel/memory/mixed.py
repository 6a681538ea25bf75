"""One plan over recomputation, offloading and compression: what is measured for it, and what it says of a tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from lightning_hybrid.compat import storage_key
from lightning_hybrid.functional.mixing_plan import Way
from lightning_hybrid.parallel.memory.compressed import Compressed
from lightning_hybrid.parallel.memory.compression import Compression
from lightning_hybrid.parallel.memory.costs import CostMeter
from lightning_hybrid.parallel.memory.frames import Frame, Site
from lightning_hybrid.parallel.memory.inputs import Arguments
from lightning_hybrid.parallel.memory.keys import Key, Met, SavedKeys
from lightning_hybrid.parallel.memory.mixed_codes import Code, CodeMeter, Codes
from lightning_hybrid.parallel.memory.mixed_items import Item, Measured, Part, measured_pass
from lightning_hybrid.parallel.memory.offload import Offload
from lightning_hybrid.parallel.memory.offload_copies import Copies

COPIED_BYTES = 2**24
NUM_COPIES = 5
COPIES = -1
"""Number in a key of what has none."""


@dataclass
class _Use:
    """What was seen of a storage; see `mixed_items.Use`."""

    met: Met
    codes: Codes | None
    is_lossy: bool
    savers: set[str] = field(default_factory=set)
    moves_as_argument: bool = True
    moves_as_saved: bool = False
    is_part: bool = False

    def item(self, part: Part, reached: Collection[str]) -> Item:
        """What it takes. What one operation moves, it moves for all; what a repetition needs must move by itself."""
        can_move = self.moves_as_argument and (self.moves_as_saved or not self.savers) and not self.is_part
        item = Item(self.met.num_bytes, frozenset(self.met.keys), is_saved=bool(self.savers), can_move=can_move)
        code = None if self.codes is None or self.is_part else self._code(self.codes, part, reached)
        return item if code is None else replace(item, compressed_bytes=code.num_bytes, compress_seconds=code.seconds)

    def _code(self, codes: Codes, part: Part, reached: Collection[str]) -> Code | None:
        """What is encoded only after the next block has run counts as if it were not."""
        if part == "internal" and codes.savers:
            return None if codes.is_held else codes.trial
        if codes.group not in reached:
            return None
        return codes.either() if part == "arguments" else codes.together(is_lossy=self.is_lossy)


class MixMeter:
    """Measures steps in which all blocks are recomputed, if there is recomputation, and all is compressed that can be.

    Args:
        keys: Tells storages apart.
        costs: Measures blocks; None without recomputation.
        sites: The blocks that are recomputed, in the order in which `costs` numbers them.
        offload: Moves what it can; None without offloading.
        compression: Compresses what it can; None without compression.
        device: Where blocks compute.

    Attributes:
        measured: Of the passes that have ended.
    """

    def __init__(
        self,
        keys: SavedKeys,
        costs: CostMeter | None,
        sites: Sequence[Site],
        offload: Offload | None,
        compression: Compression | None,
        device: torch.device,
    ) -> None:
        self._keys, self._costs, self._offload = keys, costs, offload
        self._names = [site.name for site in sites]
        self._copies = {site.name: site.buffers.num_bytes for site in sites}
        self._codes = None if compression is None else CodeMeter(compression, keys, device)
        self._is_lossy = compression is not None and compression.codec.lossy is not None
        self._uses: dict[int, _Use] = {}
        self.measured = Measured()
        keys.observer = self

    def start(self) -> None:
        """A new step."""
        if self._costs is not None:
            self._costs.start()

    def finish(self, copy_seconds: float) -> Measured:
        """End the measurement; a step has ended.

        Args:
            copy_seconds: Time in which a byte goes to host memory and comes back.
        """
        self._keys.observer = None
        result, costs = self.measured, self._costs
        result.in_flight, result.copy_seconds = self._keys.in_flight, copy_seconds
        if costs is not None:
            result.in_flight = max(result.in_flight, costs.in_flight)
            result.seconds = {
                name: cost.seconds for name, cost in zip(self._names, costs.costs, strict=True) if cost is not None
            }
        return result

    def saved(self, tensor: Tensor, met: Met) -> None:
        """See `keys.KeyObserver`. Operations of recomputed blocks do not get so far, but their arguments do."""
        is_argument = self._costs is not None and self._keys.group in self._names
        self._note(tensor, met, by_operation=not is_argument)

    @contextmanager
    def watch(self, position: int, arguments: Arguments, frame: Frame) -> Iterator[Callable[[Tensor], object]]:
        """See `recompute.CallObserver`."""
        assert self._costs is not None
        with self._costs.watch(position, arguments, frame) as seen:

            def note(tensor: Tensor) -> None:
                seen(tensor)
                met = self._keys.saved(tensor)
                if met is not None:
                    self._note(tensor, met, by_operation=True)
                    if self._codes is not None and type(tensor) is Tensor:
                        self._codes.note(tensor, met)

            yield note
        if self._codes is not None:
            self._codes.end_block()

    def pass_ended(self, met: list[Met], called: list[str], *, goes_on: bool) -> None:
        """See `keys.KeyObserver`."""
        uses = [self._use(storage) for storage in met if storage.keys]
        found = measured_pass([use for use in uses if use.savers or self._costs is not None], called)
        if goes_on:  # the first block runs while what the last one has saved is still on its way
            last = [item for (unit, _, _), item in found.items.items() if unit == called[-1]]
            moving = sum(item.num_bytes for item in last if item.can_move)
            found.beside[called[0]] = found.beside.get(called[0], 0) + moving
        for name in called:
            if self._copies.get(name):  # of buffers, which a repetition saves
                found.items[name, "internal", Key(name, COPIES, is_argument=False)] = Item(self._copies[name])
        self.measured.add(found)
        self._uses.clear()
        if self._codes is not None:
            self._codes.end_pass()

    def _use(self, met: Met) -> _Use:
        codes = None if self._codes is None else self._codes.codes(met)
        return self._uses.setdefault(id(met), _Use(met, codes, self._is_lossy))

    def _note(self, tensor: Tensor, met: Met, *, by_operation: bool) -> None:
        use, can_move = self._use(met), self._offload is not None and self._offload.can_move(tensor)
        use.is_part |= type(tensor) is not Tensor  # which is kept as it is
        if by_operation:
            use.savers.add(self._keys.group)
            use.moves_as_saved |= can_move
        else:
            use.moves_as_argument &= can_move


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
        met = self._keys.find(tensor)
        found = (self._ways.get(key) for key in (met.keys if met is not None else ()))
        return next((way for way in found if way is not None), None)

    def offloads(self, tensor: Tensor) -> bool:
        """Whether it goes to host memory if it can."""
        return self.way(tensor) in ("offloaded", None)


class StoredWatch:
    """Counts what passes hold under a plan, whose sizes may be others than in the steps that were measured.

    Args:
        keys: Tells storages apart.
        choice: The plan.
        offload: Moves what the plan does not know; None without offloading, where that is held.
        compression: Compresses what the plan tells it to; None without compression.
    """

    def __init__(
        self, keys: SavedKeys, choice: MixedChoice, offload: Offload | None, compression: Compression | None
    ) -> None:
        self._keys, self._choice = keys, choice
        self._held: tuple[Way | None, ...] = (
            ("kept", "compressed") if offload is not None else ("kept", "compressed", None)
        )
        self._num_bytes, self._num_passes = 0, keys.num_passes
        self._seen, self._taken = set[int](), set[int]()
        keys.observer = self
        if offload is not None:
            offload.chooses = choice.offloads
        if compression is not None:
            compression.chooses, compression.settled = self._compresses, self._settled

    def take(self) -> int:
        """Bytes that a pass has held between forward and backward, on average of those since the last time."""
        before, self._num_passes = self._num_passes, self._keys.num_passes
        found, self._num_bytes = self._num_bytes, 0
        return found // max(1, self._num_passes - before)

    def saved(self, tensor: Tensor, met: Met) -> None:
        """See `keys.KeyObserver`."""
        if id(met) not in self._seen:
            self._seen.add(id(met))
            self._num_bytes += met.num_bytes if self._choice.way(tensor) in self._held else 0

    def pass_ended(self, met: list[Met], called: list[str], *, goes_on: bool) -> None:
        """See `keys.KeyObserver`."""
        self._seen.clear()

    def _compresses(self, tensor: Tensor) -> bool:
        way = self._choice.way(tensor)
        if way in self._held:
            self._taken.add(storage_key(tensor))
        return way in ("compressed", None)

    def _settled(self, stored: Compressed) -> None:
        if stored.key in self._taken:
            self._taken.remove(stored.key)
            self._num_bytes += 0 if stored.encoded is None else stored.encoded.num_bytes - stored.num_bytes


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
