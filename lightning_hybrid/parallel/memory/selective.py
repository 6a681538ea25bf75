"""Selective recomputation: results of products and attention are kept, which take most time; the rest is made again.

Korthikanti et al. 2022 (arXiv:2205.05198, section 5) put it the other way round and recompute attention alone, of which
today's kernels save hardly anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from typing_extensions import Self, override

from lightning_hybrid.compat import TorchDispatchMode
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.ledgers.fates import Release, announce

PRODUCTS = (
    *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm", "aten._scaled_mm"),
    *("aten.convolution", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention"),
    "aten._scaled_dot_product_cudnn_attention",
)
"""Operations whose results are kept unless others are named."""
DROPOUT = {
    "aten._scaled_dot_product_flash_attention_for_cpu": 3,
    "aten._scaled_dot_product_flash_attention": 3,
    "aten._scaled_dot_product_efficient_attention": 5,
    "aten._scaled_dot_product_cudnn_attention": 5,
}
"""Position of the probability of dropping. What draws random numbers must run again, or later draws would differ."""
UNCOUNTED = frozenset({"aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.unsafe_chunk"})
"""Writes to their results do not count as writes to what they split, which may be kept."""
_depth = 0


def is_keeping() -> bool:
    """Whether results may be kept now as they are, so that nobody may write to them."""
    return _depth > 0


def check_operations(names: Sequence[str]) -> frozenset[str]:
    """Names of operations such as "aten.mm".

    Raises:
        ValueError: If torch has no such operation.
    """
    for name in names:
        namespace, _, operation = str(name).partition(".")
        if not operation or not hasattr(getattr(torch.ops, namespace), operation):
            raise ValueError(
                f"keep={list(names)}: torch has no operation {name!r}. Give names such as 'aten.mm' or "
                "'aten.convolution'; torch.profiler shows which ones a model calls."
            )
    return frozenset(names)


class Selective:
    """Makes the contexts of a call and its repetition.

    Args:
        names: Operations whose results are kept.
    """

    def __init__(self, names: Collection[str] = PRODUCTS) -> None:
        self._names = frozenset(names)

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """See `frames.Contexts`."""
        kept: list[Release] = []
        first, again = (self._only(m) for m in create_selective_checkpoint_contexts(partial(self._policy, kept)))
        weakref.finalize(again, _release, kept).atexit = False
        return _keeping(first), again

    def _only(self, mode: Any) -> _Only:
        return _Only(mode, self._names)

    def _policy(self, kept: list[Release], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if _draws(_name(operation), args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            results = leaves_of(getattr(context, "op_output", None))  # since torch 2.13; ledgers miss them before
            kept += [announce(result, "kept") for result in results if isinstance(result, Tensor)]
        return CheckpointPolicy.MUST_SAVE


class _Only(TorchDispatchMode):
    """Shows one of torch's contexts the operations whose results may be kept, and no others.

    It numbers all that it sees, and `fully_shard` inside a block runs others in the repetition than it did at first.

    Args:
        mode: The context.
        names: Of the operations.
    """

    def __init__(self, mode: Any, names: Collection[str]) -> None:
        super().__init__()
        self._mode, self._names = mode, names

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the context's."""
        return True

    @override
    def __enter__(self) -> Self:
        with self._mode:  # which numbers from 0 again
            pass
        super().__enter__()
        return self

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        if name in UNCOUNTED:
            raise RuntimeError(
                f"A block calls {name}, as nn.GRU and nn.LSTM do on CPUs, to write to parts of a result, and "
                "policy='selective' would not see that a result which it keeps has changed. Choose policy='full', or "
                "leave such blocks out of the recomputation with blocks=[...]."
            )
        if name in self._names:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation))


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    position = DROPOUT.get(name)
    if position is None:
        return False
    return bool(kwargs.get("dropout_p", args[position] if len(args) > position else 0.0))


def _release(kept: list[Release]) -> None:
    for release in kept:
        release()


@contextmanager
def _keeping(context: AbstractContextManager[Any]) -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        with context:
            yield
    finally:
        _depth -= 1
