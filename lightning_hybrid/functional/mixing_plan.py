"""What plans are made of that keep, recompute, offload or compress each saved tensor, and what a plan takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hybrid.functional.segments import Segment

Way = Literal["kept", "offloaded", "compressed", "dropped"]
"""What becomes of a saved tensor; of one that is dropped nothing is held: it is made again, or nothing reads it."""


@dataclass(frozen=True)
class Saved:
    """A storage that is held for the backward pass.

    Attributes:
        num_bytes: Bytes of it.
        compressed_bytes: Bytes of it when it is compressed; None if it cannot be.
        compress_seconds: Time to encode and decode it.
        offload_seconds: Time of its copies to host memory and back; None if it cannot move.
        later: Units behind its own that read it too, where it is there whatever becomes of it otherwise. Peaks count
            that by `mixing_room.units_with_room`.
    """

    num_bytes: int
    compressed_bytes: int | None = None
    compress_seconds: float = 0.0
    offload_seconds: float | None = None
    later: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unit:
    """A block and the code behind it; or what stands before the first block, as a unit without a block.

    Attributes:
        arguments: What a recomputed segment that begins with the block keeps.
        is_saved: Of each argument, whether operations save it too if the block is not recomputed.
        internal: What operations of the block save besides.
        after: What the code behind the block saves. It is never recomputed.
        seconds: Time of the block's forward; None if the block cannot be recomputed.
        beside: Bytes that are there besides while the block runs, and in its backward: what its operations save and
            the next unit counts among its arguments.
    """

    arguments: tuple[Saved, ...] = ()
    is_saved: tuple[bool, ...] = ()
    internal: tuple[Saved, ...] = ()
    after: tuple[Saved, ...] = ()
    seconds: float | None = None
    beside: int = 0

    @property
    def saved_arguments(self) -> tuple[Saved, ...]:
        """Arguments that operations save."""
        return tuple(saved for saved, is_saved in zip(self.arguments, self.is_saved, strict=True) if is_saved)


@dataclass(frozen=True)
class Ways:
    """What becomes of each saved tensor of a unit, in the order of the unit's."""

    arguments: tuple[Way, ...] = ()
    internal: tuple[Way, ...] = ()
    after: tuple[Way, ...] = ()


@dataclass(frozen=True)
class Mix:
    """A plan.

    Attributes:
        segments: From the first unit to the last: one unit that is kept, or some that are recomputed together.
        ways: Of each unit. Internal tensors of a recomputed unit are dropped, and its arguments unless its segment
            begins with it; of a kept unit the arguments that no operation saves.
    """

    segments: tuple[Segment, ...] = ()
    ways: tuple[Ways, ...] = ()


def check_units(units: Sequence[Unit]) -> None:
    """Refuse costs that are none.

    Raises:
        ValueError: If bytes or times are negative or not finite, or `is_saved` is not as long as `arguments`.
    """
    for unit in units:
        if len(unit.is_saved) != len(unit.arguments):
            raise ValueError(f"is_saved must say of each of {len(unit.arguments)} arguments, got {unit.is_saved}.")
        saved = [*unit.arguments, *unit.internal, *unit.after]
        times = [unit.seconds, *(s.compress_seconds for s in saved), *(s.offload_seconds for s in saved)]
        sizes = [unit.beside, *(s.num_bytes for s in saved), *(s.compressed_bytes for s in saved)]
        wrong = [cost for cost in (*sizes, *times) if cost is not None and not 0 <= cost < math.inf]
        if wrong:
            raise ValueError(f"Costs must be finite and not negative, got {wrong[0]} in {unit}. Measure them again.")


def pairs_of(unit: Unit, ways: Ways) -> Iterator[tuple[Saved, Way]]:
    """Each saved tensor of a unit, and what becomes of it."""
    yield from zip(unit.arguments, ways.arguments, strict=True)
    yield from zip(unit.internal, ways.internal, strict=True)
    yield from zip(unit.after, ways.after, strict=True)


def bytes_at(units: Sequence[Unit], segment: Segment) -> int:
    """Bytes that a segment has on the device while it runs or is in its backward, whatever becomes of them elsewhere.

    Of a kept unit that is all that it saves; of a recomputed segment the arguments of its first block, what operations
    of all its blocks save besides, and what the code behind each of them does; and what is beside the last.
    """
    first, *others = units[segment.start : segment.stop]
    there = [first.arguments if segment.recomputed else first.saved_arguments, first.internal, first.after]
    for unit in others:
        there += [unit.saved_arguments, unit.internal, unit.after]
    return units[segment.stop - 1].beside + sum(saved.num_bytes for part in there for saved in part)


def mix_stored_bytes(units: Sequence[Unit], mix: Mix) -> int:
    """Bytes that a plan has on the device between forward and backward, of one micro-batch."""
    return sum(_stored(pairs_of(unit, ways)) for unit, ways in zip(units, mix.ways, strict=True))


def mix_peak_bytes(units: Sequence[Unit], mix: Mix, in_flight: int = 1) -> int:
    """Most bytes that a plan has on the device at once.

    While the step is in a segment, forward or backward, there are all its tensors as they are, what is stored of the
    units before, and what the last unit before has moved to host memory, as it is still leaving or already back.

    Args:
        units: All units, in the order in which they run.
        mix: The plan.
        in_flight: Micro-batches whose activations are held at once, the one that runs included; 1 without a pipeline.
    """
    stored, moved, peak = 0, 0, 0
    for segment in mix.segments:
        peak = max(peak, stored + moved + bytes_at(units, segment))
        pairs = [list(pairs_of(units[i], mix.ways[i])) for i in range(segment.start, segment.stop)]
        stored += sum(map(_stored, pairs))
        moved = _total(pairs[-1], "offloaded")
    return (in_flight - 1) * stored + peak


def mix_seconds(units: Sequence[Unit], mix: Mix) -> float:
    """Time that a plan adds to the step of a micro-batch: forward of recomputed blocks, codecs and copies."""
    return math.fsum(_times(units, mix, mix.segments))


MIX_COLUMNS = ("blocks", "bytes kept", "recomputed", "offloaded", "compressed", "extra ms")


def mix_rows(names: Sequence[str], units: Sequence[Unit], mix: Mix) -> list[tuple[str, ...]]:
    """What a table of a plan shows, in `MIX_COLUMNS`: a row a kept unit or recomputed segment, and totals.

    Args:
        names: Of the units.
        units: All units; bytes and times are those of one micro-batch.
        mix: The plan.
    """
    labels = [" to ".join(dict.fromkeys((names[s.start], names[s.stop - 1]))) for s in mix.segments]
    rows = [(label, *_cells(units, mix, [segment])) for label, segment in zip(labels, mix.segments, strict=True)]
    return [*rows, ("all", *_cells(units, mix, mix.segments))]


def mix_bytes(units: Sequence[Unit], mix: Mix) -> dict[str, int]:
    """Bytes of a micro-batch by what becomes of them.

    Args:
        units: All units.
        mix: The plan.

    Returns:
        "kept_bytes", "recomputed_bytes" (what is dropped until a block runs again), "offloaded_bytes",
        "uncompressed_bytes" and "compressed_bytes": before and after compression.
    """
    return _bytes_of(units, mix, mix.segments)


def _bytes_of(units: Sequence[Unit], mix: Mix, segments: Collection[Segment]) -> dict[str, int]:
    inside = [(units[i], mix.ways[i]) for s in segments for i in range(s.start, s.stop)]
    pairs = [pair for unit, ways in inside for pair in pairs_of(unit, ways)]
    dropped = [
        bytes_at(units, s) - units[s.stop - 1].beside - sum(saved.num_bytes for saved in units[s.start].arguments)
        - sum(saved.num_bytes for unit in units[s.start : s.stop] for saved in unit.after)
        for s in segments
        if s.recomputed
    ]  # fmt: skip
    return {
        "kept_bytes": _total(pairs, "kept"),
        "recomputed_bytes": sum(dropped),
        "offloaded_bytes": _total(pairs, "offloaded"),
        "uncompressed_bytes": _total(pairs, "compressed"),
        "compressed_bytes": sum(saved.compressed_bytes or 0 for saved, way in pairs if way == "compressed"),
    }


def _cells(units: Sequence[Unit], mix: Mix, segments: Collection[Segment]) -> tuple[str, ...]:
    kept, recomputed, offloaded, before, after = (f"{n:,}" for n in _bytes_of(units, mix, segments).values())
    compressed = "0" if before == "0" else f"{before} to {after}"
    return kept, recomputed, offloaded, compressed, f"{1000 * math.fsum(_times(units, mix, segments)):.2f}"


def _times(units: Sequence[Unit], mix: Mix, segments: Iterable[Segment]) -> Iterator[float]:
    for segment in segments:
        for index in range(segment.start, segment.stop):
            if segment.recomputed:
                yield units[index].seconds or 0.0
            for saved, way in pairs_of(units[index], mix.ways[index]):
                if way == "compressed":
                    yield saved.compress_seconds
                elif way == "offloaded":
                    yield saved.offload_seconds or 0.0


def _stored(pairs: Iterable[tuple[Saved, Way]]) -> int:
    bytes_of = ((s.num_bytes if way == "kept" else s.compressed_bytes, way) for s, way in pairs)
    return sum(size or 0 for size, way in bytes_of if way in {"kept", "compressed"})


def _total(pairs: Iterable[tuple[Saved, Way]], chosen: Way) -> int:
    return sum(saved.num_bytes for saved, way in pairs if way == chosen)
