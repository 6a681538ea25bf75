"""Activation recomputation around calls of modules: what they save for backward is dropped, and made again there.

`torch.utils.checkpoint` was considered. It takes one function, so that several blocks that the user's own loop calls
one after the other could not be one segment; it replays torch's random streams and not Python's or NumPy's; and it
updates running statistics twice. As there, no input needs a gradient, a repetition stops as soon as the last tensor is
there, and torch's contexts for selective recomputation serve.

A segment of several blocks keeps the first one's arguments. Those of the next are results of the one before, wherever
the user's code passes them on as they are, and are kept where it does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.ledgers.fates import Kept, announce
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, keep
from lightning_hybrid.parallel.memory.inputs import Arguments, place_of
from lightning_hybrid.parallel.memory.replay import AttributeGuard, Autocast, BufferGuard, Streams, own_generators
from lightning_hybrid.parallel.tensor.split_tensor import part_of

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes a context for a forward and one for its repetition, as `torch.utils.checkpoint` takes them."""
Link = tuple[int, int]
"""Call of a segment, and leaf of its result."""


class _Enough(BaseException):
    """Ends a repetition whose last needed tensor is there, past any `except Exception`."""


class _Holder:
    """What a graph holds in place of a tensor that is made again."""

    def __init__(self, frame: Frame, tensor: Tensor) -> None:
        self._frame, self._about = frame, (tensor.shape, tensor.dtype)
        self.tensor: Tensor | None = None
        self.first: Kept | None = keep(tensor)  # until the call ends, which may run a backward pass of its own
        self._release = announce(tensor, "recomputed")

    def __del__(self) -> None:
        self._release()

    def unpack(self) -> Tensor:
        """The tensor; the next time it is made again."""
        if self.first is not None:
            return self.first.unpack()
        if self.tensor is None:
            self._frame.repeat()
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        return tensor

    def fill(self, tensor: Tensor) -> bool:
        """Take what the repetition has made; returns whether it can be the same."""
        self.tensor = tensor.detach()
        announce(self.tensor, "kept", self._release)  # for the module's name; it counts until its memory is free
        self._release()
        return (tensor.shape, tensor.dtype) == self._about


class Site:
    """A module whose calls are repeated.

    Args:
        name: Its dotted name, for errors.
        module: The module.
        device: Where it computes.
    """

    def __init__(self, name: str, module: nn.Module, device: torch.device) -> None:
        self.name, self.module, self.device = name, module, device
        self.buffers, self.spaces = BufferGuard(module), [vars(child) for child in module.modules()]
        self.generators = own_generators(module)

    @property
    def has_units(self) -> bool:
        """Whether `fully_shard` has made units of parts of it. No exception may end them, or they miss their ends."""
        return any(isinstance(child, FSDPModule) for child in self.module.modules() if child is not self.module)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the module has whole parameters, as it does in its own backward pass anyway."""
        module = self.module
        if not isinstance(module, FSDPModule) or not any(isinstance(p, DTensor) for p in _unit_parameters(module)):
            yield
            return
        module.unshard()
        try:
            yield
        finally:
            module.reshard()


def _unit_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Those that `fully_shard` gathers with a module: without those of units inside, which gather their own."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _unit_parameters(child)


class _Call:
    """One call, and what it takes to repeat it."""

    def __init__(self, site: Site, proceed: Callable[..., Any], arguments: Arguments) -> None:
        self.site, self.proceed, self.arguments = site, proceed, arguments
        self.streams, self.autocast = Streams(site.device, site.generators), Autocast(site.device)
        self.buffers: dict[Any, Any] = {}
        self.guard, self.attributes = AttributeGuard(site.spaces, arguments.spaces), list[dict[str, Any]]()
        self.context: AbstractContextManager[Any] = nullcontext()
        self.holders: list[weakref.ref[_Holder]] = []

    @property
    def num_needed(self) -> int:
        """How many tensors, from the first, until the last that somebody waits for."""
        alive = (number for number in range(len(self.holders), 0, -1) if self.holders[number - 1]() is not None)
        return next(alive, 0)

    def end(self) -> None:
        """The first run is over: drop what it has saved."""
        for holder in (reference() for reference in self.holders):
            if holder is not None:
                holder.first = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which everything is as the forward found it."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.site.gathered())
            stack.enter_context(self.streams.again())
            stack.enter_context(self.autocast.again())
            stack.enter_context(self.guard.again(self.attributes))
            stack.enter_context(self.site.buffers.again(self.buffers))
            stack.enter_context(self.context)
            yield


class Frame:
    """A segment: one call or several in a row, repeated together.

    Args:
        segment: Its number in a plan.
    """

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self._calls: list[_Call] = []
        self._results: dict[Any, tuple[Link, StorageWeakRef]] = {}

    def link(self, tensor: Tensor) -> Link | None:
        """Where a tensor is a result of this segment."""
        link, storage = self._results.get(place_of(tensor), (None, None))
        return None if storage is None or storage.expired() else link

    def run(
        self,
        site: Site,
        arguments: Arguments,
        call: Callable[[], Any],
        proceed: Callable[..., Any],
        contexts: Contexts | None = None,
        seen: Callable[[Tensor], object] = lambda tensor: None,
    ) -> Any:
        """Run a call for the first time, as the segment's last.

        Args:
            site: Whose call it is.
            arguments: Of a repetition.
            call: Runs it.
            proceed: Runs it with other arguments.
            contexts: For selective recomputation.
            seen: Told each tensor that is dropped.

        Raises:
            RuntimeError: If the call changes what it would need again.
        """
        made = _Call(site, proceed, arguments)
        context = nullcontext()
        if contexts is not None:
            context, made.context = contexts()  # type: ignore[assignment]

        def pack(tensor: Tensor) -> _Holder:
            seen(tensor)
            holder = _Holder(self, tensor)
            made.holders.append(weakref.ref(holder))
            return holder

        buffers, attributes = site.buffers.before(), made.guard.before()
        try:
            with context, ChainedHooks(pack):
                result = call()
        finally:
            made.end()
        made.buffers = site.buffers.after(buffers, site.name)
        made.attributes = made.guard.after(attributes)
        made.streams.finish()
        arguments.check(site.name)
        for leaf, value in enumerate(leaves_of(result)):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                part = part_of(value)
                self._results[place_of(part)] = (len(self._calls), leaf), StorageWeakRef(part.untyped_storage())
        self._calls.append(made)
        return result

    def repeat(self) -> None:
        """Make all tensors again that somebody still waits for.

        Raises:
            RuntimeError: If the repetition makes others.
        """
        last = max((i for i, call in enumerate(self._calls) if call.num_needed), default=-1)
        results: list[list[Any]] = []
        for index, call in enumerate(self._calls[: last + 1]):
            args, kwargs = call.arguments.restored(lambda link: part_of(results[link[0]][link[1]]))
            result = self._repeat(call, args, kwargs, is_last=index == last)
            results.append([_detached(leaf) for leaf in leaves_of(result)])

    def _repeat(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_last: bool) -> Any:
        made, needed = 0, call.num_needed
        ends_early = is_last and not call.site.has_units

        def pack(tensor: Tensor) -> Kept:
            nonlocal made
            if made == len(call.holders):
                raise mismatch(call, "saves more tensors")
            holder = call.holders[made]()
            made += 1
            if holder is not None and not holder.fill(tensor):
                raise mismatch(call, f"saves {list(tensor.shape)} {tensor.dtype} in place of another tensor")
            if ends_early and made == needed:
                raise _Enough
            return keep(tensor)

        result = None
        try:
            with _explained(call), call.again(), ChainedHooks(pack):
                result = call.proceed(*args, **kwargs)
        except _Enough as enough:
            clear_frames(enough.__traceback__)  # they hold tensors, and contexts that the exception left hold it
        if made < (needed if ends_early else len(call.holders)):
            raise mismatch(call, "saves fewer tensors")
        return result


@contextmanager
def _explained(call: _Call) -> Iterator[None]:
    """Context in which errors of torch's selective checkpoint say what to do."""
    try:
        yield
    except RuntimeError as error:
        if "selective activation checkpoint" not in str(error):
            raise
        raise RuntimeError(
            f"{call.site.name}, with policy='selective': {str(error).rstrip('.')}. Nobody may write to kept results in "
            "place, and a graph runs backward once, without a gradient of a gradient. Choose policy='full', or leave "
            "the block out of the recomputation with blocks=[...]."
        ) from error


def mismatch(call: _Call, what: str) -> RuntimeError:
    """The error of a repetition that went another way."""
    return RuntimeError(
        f"{call.site.name} {what} for backward when its forward is repeated than it did at first. It depends on "
        "something that has changed meanwhile, such as a list that it adds to, or a cache among its arguments: leave "
        "the block out of the recomputation with blocks=[...]."
    )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
