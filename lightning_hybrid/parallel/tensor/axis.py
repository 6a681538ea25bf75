"""The tensor axis of one rank: its group, and the collectives that autograd goes through.

The functions are those of Shoeybi et al. 2019 (arXiv:1909.08053, section 3) and Korthikanti et al. 2022
(arXiv:2205.05198, section 4.2). A plain tensor stands for one whole value, equal on all ranks, and so does its
gradient; a part stands for itself, and its gradient is that of the part. What a whole value is used for on every rank
in another way makes partial gradients: it has to `enter`. Each backward is one of these functions again, so that a
gradient can be differentiated (a gradient penalty).

Torch's functional collectives were considered: they have no uneven parts, and DTensor's redistribution reduces the
gradients of bfloat16 parameters in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from lightning_hybrid.compat import all_gather_flat, is_view, reduce_scatter_flat
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.memory.selective import is_keeping


class TensorAxis:
    """The ranks that share the matrices of one model.

    Attributes:
        group: Their process group.
        rank: This one's position.
        size: How many they are.
        active: A step is under way: modules show split parameters as `SplitTensor`s, and outside it as they are.
        regather: Inputs that were gathered from sequence shards are gathered again in backward instead of being kept.
        sequence: In a block with sequence parallelism: the split of its hidden states and their whole shape.
        recomputed: The same, of what a checkpoint within a block's forward recomputes last.
        entered: The inputs that entered last, with what became of them, so that several layers share one entry.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.active = self.regather = False
        self.sequence: tuple[Split, tuple[int, ...]] | None = None
        self.recomputed: tuple[Split, tuple[int, ...]] | None = None
        self.entered: list[tuple[Tensor, int, bool, Tensor, Again | None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self  # a copy of a module computes with the same ranks

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before
            self.entered.clear()

    def sum(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place; returns it."""
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def gather(self, part: Tensor, split: Split) -> Tensor:
        """The whole of which each rank has a part."""
        longest = sum(split.shares(self.size, 0))
        padded = _padded(part.contiguous(), split.dim, longest)
        buffer = padded.new_empty((self.size, *padded.shape))
        parts = list(buffer.unbind())
        all_gather_flat(buffer.flatten(0, 1), padded, self.group)
        if split.is_even(self.size):
            if len(split.sections) == 1 and prod(part.shape[: split.dim]) == 1:
                return buffer.view(split.whole_shape(part.shape))
            return split.join(parts)
        lengths = [sum(split.shares(self.size, rank)) for rank in range(self.size)]
        return split.join([part.narrow(split.dim, 0, n) for part, n in zip(parts, lengths, strict=True)])

    def sum_part(self, whole: Tensor, split: Split) -> Tensor:
        """This rank's part of the sum of what the ranks have."""
        longest = sum(split.shares(self.size, 0))
        parts = [_padded(split.take(whole, self.size, rank), split.dim, longest) for rank in range(self.size)]
        mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        reduce_scatter_flat(mine, torch.stack(parts).flatten(0, 1), self.group)
        return mine.narrow(split.dim, 0, sum(split.shares(self.size, self.rank)))

    def part(self, whole: Tensor, split: Split) -> Tensor:
        """This rank's part."""
        return split.take(whole, self.size, self.rank)


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    missing = length - part.shape[dim]
    if not missing:
        return part
    return torch.cat([part, part.new_zeros((*part.shape[:dim], missing, *part.shape[dim + 1 :]))], dim)


def enter(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Forward nothing; backward sums the gradients (f of arXiv:1909.08053), a parameter's in float32 at least."""
    result: Tensor = _Enter.apply(tensor, axis) if tensor.requires_grad else tensor
    return result


def reduce(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Forward sums what the ranks have computed, in place; backward nothing (g of arXiv:1909.08053)."""
    tensor = tensor.contiguous()
    result: Tensor = _Reduce.apply(tensor.clone() if is_view(tensor) or is_keeping() else tensor, axis)
    return result


def count_once(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Forward nothing; backward keeps the gradient on the first rank: one that all have and that is summed later."""
    result: Tensor = _CountOnce.apply(tensor, axis) if tensor.requires_grad else tensor
    return result


def reduce_to_part(tensor: Tensor, split: Split, axis: TensorAxis) -> Tensor:
    """Forward sums and keeps a part (reduce-scatter); backward gathers (g-bar of arXiv:2205.05198)."""
    result: Tensor = _ReduceToPart.apply(tensor, split, axis)
    return result


def take(tensor: Tensor, split: Split, axis: TensorAxis) -> Tensor:
    """Forward keeps a part of a whole value; backward gathers.

    Raises:
        RuntimeError: If the tensor is no whole.
    """
    if tensor.shape[split.dim] != split.length:
        raise RuntimeError(
            f"A tensor of shape {list(tensor.shape)} meets parts of one of length {split.length} on dimension "
            f"{split.dim}. Code that torch functions do not see, such as a torch.autograd.Function, may have returned "
            "this rank's part alone: give the module that calls it the style 'replicated' in tensor_parallel_plan."
        )
    result: Tensor = _Take.apply(tensor, split, axis)
    return result


def gather(tensor: Tensor, split: Split, axis: TensorAxis) -> Tensor:
    """Forward makes a part whole, for ranks that go on alike; backward keeps the part's gradient."""
    result: Tensor = _Gather.apply(tensor, split, axis)
    return result


def gather_and_enter(tensor: Tensor, split: Split, axis: TensorAxis, again: Again | None = None) -> Tensor:
    """Forward gathers, for ranks that go on differently; backward sums and keeps a part (g of arXiv:2205.05198)."""
    result: Tensor = _GatherAndEnter.apply(tensor, split, axis, again)
    return result


def refuse_second_derivative(what: str) -> None:
    """In a backward function that autograd cannot differentiate: torch would take its result for a constant.

    Raises:
        RuntimeError: If the gradient is to be differentiated.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} cannot be differentiated twice (create_graph=True). Give the head the style 'replicated' in "
            "tensor_parallel_plan, or use sequence_parallel=True or False instead of 'regather'."
        )


class Again:
    """A gathered tensor that can be gathered again, once for all layers that took it.

    Args:
        split: How.
        axis: The ranks.
    """

    def __init__(self, split: Split, axis: TensorAxis) -> None:
        self._split, self._axis = split, axis
        self._whole: Tensor | None = None

    def whole(self, part: Tensor) -> Tensor:
        """Gather, unless that was done in this backward pass.

        Args:
            part: What was gathered, as autograd has kept it.
        """
        if self._whole is None:
            self._whole = self._axis.gather(part, self._split)
        return self._whole

    def forget(self) -> None:
        """The backward passes of all layers that took it have run."""
        self._whole = None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis, ctx.is_parameter = axis, isinstance(tensor, nn.Parameter)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(gradient.dtype, torch.float32) if ctx.is_parameter else gradient.dtype
        total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        return _Reduce.apply(total, ctx.axis).to(gradient.dtype), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.axis = axis
        return axis.sum(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return enter(gradient, ctx.axis), None


class _CountOnce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis) -> Tensor:
        ctx.is_first = axis.rank == 0
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.is_first else torch.zeros_like(gradient), None


class _ReduceToPart(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, axis: TensorAxis) -> Tensor:
        ctx.split, ctx.axis = split, axis
        return axis.sum_part(tensor, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _GatherAndEnter.apply(gradient, ctx.split, ctx.axis, None), None, None


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, axis: TensorAxis) -> Tensor:
        ctx.split, ctx.axis = split, axis
        # not a view: a part that is written must not change the whole, nor keep it in memory
        return axis.part(tensor, split).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(gradient, ctx.split, ctx.axis), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, axis: TensorAxis) -> Tensor:
        ctx.split, ctx.axis = split, axis
        return axis.gather(tensor, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(gradient, ctx.split, ctx.axis), None, None


class _GatherAndEnter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, axis: TensorAxis, again: Again | None) -> Tensor:
        ctx.split, ctx.axis, ctx.again = split, axis, again
        return axis.gather(tensor, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.again is not None:
            ctx.again.forget()
        return _ReduceToPart.apply(gradient, ctx.split, ctx.axis), None, None, None
