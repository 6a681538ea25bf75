"""Gradients of an unfinished accumulation window: what a rank has of them, and where another layout goes on with them.

A window's gradients are sums that are not complete: over the replicas (and copies of shards), over the holders of a
tied parameter, and over the tensor axis where each of its ranks makes a part. They are kept as they are, each addend
under a name of its own, `window.<place>.<parameter>`. An addend goes back to its place if there is one, so that the
same layout goes on with the same bits. All others are added to the first place: at the window's end the sum is the
same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_hybrid.parallel.checkpoint.parts import Part, Parts, part_of
from lightning_hybrid.parallel.checkpoint.places import Place
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gradients import local

WINDOW = "window."


class Reader(Protocol):
    """What a checkpoint's tensors are read with."""

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    def read(self, parts: Parts) -> None:
        """Fill the pieces of each part, in their own type and on their own device."""


class WholeTensors:
    """A reader of tensors that are in memory, or in a mapped file, as wholes.

    Args:
        tensors: By name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return list(self._tensors)

    @torch.no_grad()
    def read(self, parts: Parts) -> None:
        """Fill the pieces of each part."""
        for name, part in parts.items():
            for piece in part.pieces:
                piece.data.copy_(piece.box.view(self._tensors[name]))


def window_parts(engine: Engine) -> Parts:
    """What this rank has of the gradients of a window that goes on, between two batches; every rank calls it.

    The pieces are views of the gradients: nothing is copied, and nothing is written unless a caller does.

    Returns:
        Parts by name; none where no window is open.
    """
    if not engine.in_window:
        return {}
    unused = engine.unused_parameters()
    parts = dict[str, Part]()
    for name, places in engine.window_places().items():
        for place in places if name not in unused else ():
            gradient = place.get()
            if gradient is not None:
                addend = place.names[place.index] + _of_rank(engine, name)
                parts[_stored(addend, name)] = _part(engine, name, gradient)
    return parts


def restore_window(engine: Engine, reader: Reader, *, factor: float = 1.0) -> None:
    """Put a window's gradients where its next batches add to them, and its end sums them; every rank calls it.

    Args:
        engine: This rank's; its ownership is settled.
        reader: Of the checkpoint.
        factor: What they are multiplied by, where losses are scaled in another way than before.

    Raises:
        ValueError: If the checkpoint has gradients of parameters that the model has not.
    """
    saved = _addends(reader.names)
    _check_names(engine, saved)
    engine.forget_gradients()
    for name, places in engine.window_places().items():
        ranks, found = _of_ranks(engine, name), saved.get(name, [])
        slots = [[own + rank for own in place.names for rank in ranks] for place in places]
        strangers = sorted(set(found) - {slot for of_place in slots for slot in of_place})
        for place, of_place in zip(places, slots, strict=True):
            dealt = {slot: [slot] for slot in of_place if slot in found}
            if place is places[0] and strangers:
                dealt.setdefault(of_place[0], []).extend(strangers)
            if dealt:
                addends = dealt.get(place.names[place.index] + _of_rank(engine, name), [])
                place.put(_sum(engine, reader, name, addends, place, factor))
    engine.resume_window(saved)


def _sum(engine: Engine, reader: Reader, name: str, addends: Sequence[str], place: Place, factor: float) -> Tensor:
    """This rank's part of a sum, zeros where it is one of nothing; besides it, one addend at a time is in memory.

    Where others have a gradient it takes one too: what is frozen by now gets no more, and is summed with theirs.
    """
    total = place.empty()
    reader.read({_stored(addend, name): _part(engine, name, total) for addend in addends[:1]})
    if not addends:
        local(total).zero_()
    for addend in addends[1:]:
        gradient = place.empty()
        reader.read({_stored(addend, name): _part(engine, name, gradient)})
        local(total).add_(local(gradient))
    local(total).mul_(factor)
    return total


def _stored(addend: str, name: str) -> str:
    return f"{WINDOW}{addend}.{name}"


def _part(engine: Engine, name: str, gradient: Tensor) -> Part:
    gradient, share = gradient.to_dense() if gradient.layout is not torch.strided else gradient, engine.share(name)
    return part_of(gradient) if share is None else part_of(gradient, *share)


def _of_ranks(engine: Engine, name: str) -> list[str]:
    """Names for the ranks of a replica that have addends of a parameter's gradient; "" where one has all."""
    holders, tensors = _holders(engine, name), engine.mesh.layout.tensor if _is_deferred(engine, name) else 1
    return [_rank_name(engine, name, holder, tensor) for holder in holders for tensor in range(tensors)]


def _of_rank(engine: Engine, name: str) -> str:
    """That of this rank."""
    return _rank_name(engine, name, engine.mesh.pipeline_rank, engine.mesh.tensor_rank)


def _rank_name(engine: Engine, name: str, holder: int, tensor: int) -> str:
    tied = f"-pipeline{holder}" if len(_holders(engine, name)) > 1 else ""
    return tied + (f"-tensor{tensor}" if _is_deferred(engine, name) else "")


def _holders(engine: Engine, name: str) -> tuple[int, ...]:
    """Pipeline ranks that have the parameter."""
    assert engine.ownership is not None
    return engine.ownership.holders[name]


def _is_deferred(engine: Engine, name: str) -> bool:
    return engine.tensor is not None and name in engine.tensor.deferred


def _addends(names: Iterable[str]) -> dict[str, list[str]]:
    """By parameter, the places that its addends come from."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(WINDOW):
            place, _, parameter = name.removeprefix(WINDOW).partition(".")
            found.setdefault(parameter, []).append(place)
    return found


def _check_names(engine: Engine, saved: Mapping[str, object]) -> None:
    known = set(engine.cut.names if engine.cut is not None else engine.named_parameters())
    strange = [name for name in saved if name not in known]
    if strange:
        raise ValueError(
            f"The checkpoint was saved within an accumulation window and has gradients of {strange[:3]} "
            f"({len(strange)} in all), which {type(engine.root).__name__} has not. Resume with the model that was "
            "saved, or load the weights alone (load_from_checkpoint)."
        )
