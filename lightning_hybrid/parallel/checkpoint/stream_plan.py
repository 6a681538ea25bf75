"""Which rank sends which part of which tensor, when one rank writes what many hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_hybrid.functional.boxes import Box

Spec = tuple[tuple[int, ...], torch.dtype]  # a whole tensor's shape and type


@dataclass(frozen=True)
class Plan:
    """What is sent, in one order.

    Attributes:
        tensors: All of them.
        owners: For each, the rank that each box is taken from.
    """

    tensors: Mapping[str, Spec]
    owners: Mapping[str, Mapping[Box, int]]

    def messages(self, most: int) -> Iterator[tuple[str, Box, Box, int]]:
        """Each as (tensor, box that its rank holds, part of that with at most `most` bytes, rank)."""
        for name, boxes in self.owners.items():
            for box, rank in sorted(boxes.items()):
                for sent in box.cut(most // self.tensors[name][1].itemsize):
                    yield name, box, sent, rank

    def orders(self, rank: int) -> list[tuple[str, Box]]:
        """The boxes that a rank is to send."""
        return [(name, box) for name, boxes in self.owners.items() for box in sorted(boxes) if boxes[box] == rank]


def make_plan(described: Sequence[Mapping[str, tuple[Spec, list[Box]]]]) -> Plan:
    """Decide who sends what.

    Args:
        described: Of each rank, the tensors of which it has parts.

    Raises:
        ValueError: If the boxes do not cover each tensor exactly once.
    """
    tensors: dict[str, Spec] = {}
    owners: dict[str, dict[Box, int]] = {}
    for rank, known in enumerate(described):
        for name, (spec, boxes) in known.items():
            if tensors.setdefault(name, spec) != spec:
                raise ValueError(f"{name} is {_words(spec)} on rank {rank} and {_words(tensors[name])} on a lower one.")
            mine = owners.setdefault(name, {})
            for box in boxes:
                if box.numel:
                    mine.setdefault(box, rank)
    for name, spec in tensors.items():
        check_cover(name, spec[0], owners[name])
    return Plan(tensors, owners)


def check_cover(name: str, shape: tuple[int, ...], owners: Mapping[Box, int]) -> None:
    """Raise if boxes, each of a rank, overlap or leave something out.

    Raises:
        ValueError: Naming the tensor.
    """
    open_boxes: list[Box] = []  # those that reach as far in the first dimension as the next one begins
    for box in sorted(owners):
        open_boxes = [other for other in open_boxes if other.ends[:1] > box.offsets[:1]]
        clash = next((other for other in open_boxes if other.meet(box)), None)
        if clash is not None:
            raise ValueError(
                f"Ranks {owners[clash]} and {owners[box]} hold parts of {name} that overlap: {clash} and {box}."
            )
        open_boxes.append(box)
    held, total = sum(box.numel for box in owners), Box.of(shape).numel
    if held != total:
        raise ValueError(f"{held} of the {total} elements of {name} are held by some rank.")


def _words(spec: Spec) -> str:
    return f"{list(spec[0])} of {spec[1]}"
