"""What was measured of saved storages, by the names that they have in every step, and the units of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, Way
from lightning_hybrid.parallel.memory.keys import BEFORE, Key, Met, after

Part = Literal["arguments", "internal", "after"]
PARTS: tuple[Part, ...] = ("arguments", "internal", "after")


@dataclass(frozen=True)
class Item:
    """A storage that some operation saves, or a repetition of a block needs: the most that passes have shown of it.

    Attributes:
        num_bytes: Its bytes.
        keys: Where passes have met it.
        units: Of these, the units.
        is_saved: Of a block's argument, whether operations save it.
        compressed_bytes: Bytes of its code; None if there is none that is smaller.
        compress_seconds: Time to encode and decode it.
        can_move: Whether it may go to host memory.
    """

    num_bytes: int
    keys: frozenset[Key] = frozenset()
    units: frozenset[str] = frozenset()
    is_saved: bool = True
    compressed_bytes: int | None = None
    compress_seconds: float = 0.0
    can_move: bool = False

    def merged(self, other: Item) -> Item:
        """Of both the most bytes and time; what cannot be done with one cannot be done."""
        codes = self.compressed_bytes, other.compressed_bytes
        return Item(
            max(self.num_bytes, other.num_bytes),
            self.keys | other.keys,
            self.units | other.units,
            self.is_saved or other.is_saved,
            None if codes[0] is None or codes[1] is None else max(codes[0], codes[1]),
            max(self.compress_seconds, other.compress_seconds),
            self.can_move and other.can_move,
        )

    def saved(self, copy_seconds: float, later: tuple[int, ...] = ()) -> Saved:
        """What a planner needs to know.

        Args:
            copy_seconds: Time in which a byte goes to host memory and comes back.
            later: Places of units behind its own that read it too.
        """
        code = self.compressed_bytes
        return Saved(
            self.num_bytes,
            code if code is not None and code < self.num_bytes else None,
            self.compress_seconds,
            self.num_bytes * copy_seconds if self.can_move else None,
            later,
        )


@dataclass
class Measured:
    """What passes have shown, of one rank or several.

    Attributes:
        order: Names of units: blocks, and "(before NAME)" for what stands before a pass's first block.
        items: By unit, part of it, and first key.
        beside: By unit, bytes that are there besides while it runs: what its block saves and hands on to the next
            block, which has the item.
        starts: Blocks that get what the block before has not given as it is, so that a segment must begin with them.
        seconds: Of each block, time of its forward.
        in_flight: Most passes of which something was held at once.
        copy_seconds: Time in which a byte goes to host memory and comes back.
    """

    order: list[str] = field(default_factory=list)
    items: dict[tuple[str, Part, Key], Item] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)
    starts: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    in_flight: int = 1
    copy_seconds: float = 0.0

    @property
    def blocks(self) -> set[str]:
        """Names of the blocks that were called."""
        return {name for name in self.order if not name.startswith("(")}

    def add(self, other: Measured) -> None:
        """Take in what other passes have shown."""
        before: str | None = None
        for name in other.order:
            if name not in self.order:
                self.order.insert(self._place_behind(before), name)
            before = name
        for key, item in other.items.items():
            self.items[key] = self.items[key].merged(item) if key in self.items else item
        for name, num_bytes in other.beside.items():
            self.beside[name] = max(self.beside.get(name, 0), num_bytes)
        self.starts |= other.starts
        for name, seconds in other.seconds.items():
            self.seconds[name] = max(self.seconds.get(name, 0.0), seconds)
        self.in_flight = max(self.in_flight, other.in_flight)
        self.copy_seconds = max(self.copy_seconds, other.copy_seconds)

    def _place_behind(self, name: str | None) -> int:
        """Another chunk of a model, which begins with a unit of its own, goes behind those that are there."""
        return len(self.order) if name is None else self.order.index(name) + 1


def before(block: str | None) -> str:
    """The unit of what stands before a pass's first block."""
    return BEFORE if block is None else f"(before {block})"


class Use(Protocol):
    """What a pass has shown of a storage."""

    @property
    def met(self) -> Met:
        """The storage."""

    @property
    def savers(self) -> Collection[str]:
        """Groups whose operations save it."""

    def item(self, part: Part, reached: Collection[str]) -> Item:
        """What it takes.

        Args:
            part: Of its unit.
            reached: Groups until the next unit's block.
        """


def measured_pass(uses: Iterable[Use], called: Sequence[str]) -> Measured:
    """Sort what a pass has met into units.

    An argument that one block alone gets, made just before, is the block's own. What several groups save otherwise, or
    several blocks get, is there whatever is recomputed, from the first of them on.

    Args:
        uses: Of each storage.
        called: The blocks, in order.
    """
    first = before(called[0] if called else None)
    result = Measured([first, *called])
    unit_of = {BEFORE: first} | {group: name for name in called for group in (name, after(name))}
    earlier = dict(zip(called, result.order, strict=False))
    for use in uses:
        unit, part, key = _place(use, unit_of, earlier)
        place = result.order.index(unit)
        reached = {group for group, name in unit_of.items() if name in result.order[: place + 1]}
        item = use.item(part, reached | set(result.order[place + 1 : place + 2]))
        if part == "arguments":
            if {unit_of[group] for group in use.savers} - {unit}:
                result.beside[earlier[unit]] = result.beside.get(earlier[unit], 0) + item.num_bytes
            if unit not in use.met.handed_on:
                result.starts.add(unit)
        result.items[unit, part, key] = replace(item, units=frozenset(unit_of[key.group] for key in use.met.keys))
    return result


def _place(use: Use, unit_of: dict[str, str], earlier: dict[str, str]) -> tuple[str, Part, Key]:
    first, savers = use.met.keys[0], {unit_of[group] for group in use.savers}
    receivers = [key for key in use.met.keys if key.is_argument]
    if len(receivers) == 1:
        block = receivers[0].group
        if savers <= {block, earlier[block]} and after(block) not in use.savers:
            return block, "arguments", receivers[0]
    unit = unit_of[first.group]
    if not receivers and set(use.savers) == {unit}:
        return unit, "internal", first
    return earlier[unit] if first.is_argument else unit, "after", first


@dataclass(frozen=True)
class Units:
    """What a planner gets, and which keys its tensors have.

    Attributes:
        names: Of the units.
        units: The units.
        keys: Of each tensor of each part of each unit.
    """

    names: list[str]
    units: list[Unit]
    keys: list[dict[Part, list[frozenset[Key]]]]

    def ways(self, mix: Mix) -> dict[Key, Way]:
        """What becomes of storages under a plan, by key; of what a key has met in two places, what takes less."""
        found: dict[Key, Way] = {}
        for keys, ways in zip(self.keys, mix.ways, strict=True):
            for part in PARTS:
                for of_tensor, way in zip(keys[part], getattr(ways, part), strict=True):
                    for key in of_tensor if way != "dropped" else ():
                        found[key] = min(way, found.get(key, way), key=TIGHTEST.index)
        return found


TIGHTEST: tuple[Way, ...] = ("offloaded", "compressed", "kept")


def units_of(measured: Measured) -> Units:
    """The units of a plan. What can only be kept is one tensor of its part, so that plans are found faster."""
    found = Units(list(measured.order), [], [])
    for name in measured.order:
        saved: dict[Part, list[Saved]] = {part: [] for part in PARTS}
        keys: dict[Part, list[frozenset[Key]]] = {part: [] for part in PARTS}
        flags, fixed = list[bool](), dict[tuple[Part, bool], int]()
        for (unit, part, _), item in measured.items.items():
            if unit != name:
                continue
            places = sorted(measured.order.index(one) for one in item.units)
            later = tuple(place for place in places if place > len(found.units))
            tensor, group = item.saved(measured.copy_seconds, later), (part, item.is_saved)
            if tensor.compressed_bytes is None and tensor.offload_seconds is None and group in fixed:
                index = fixed[group]
                saved[part][index] = Saved(saved[part][index].num_bytes + tensor.num_bytes)
                keys[part][index] |= item.keys
                continue
            if tensor.compressed_bytes is None and tensor.offload_seconds is None:
                fixed[group] = len(saved[part])
            saved[part].append(tensor)
            keys[part].append(item.keys)
            flags += [item.is_saved] if part == "arguments" else []
        arguments, internal, behind = (tuple(saved[part]) for part in PARTS)
        beside, seconds = measured.beside.get(name, 0), measured.seconds.get(name)
        found.units.append(Unit(arguments, tuple(flags), internal, behind, seconds, beside))
        found.keys.append(keys)
    return found
