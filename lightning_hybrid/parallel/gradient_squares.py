"""Squares of what each backward pass adds to parameters, before anything accumulates it or sums it over replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def norm_of(gradient: Tensor) -> Tensor:
    """2-norm of a gradient, dense or sparse: a scalar of at least float32."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(values.detach(), dtype=torch.promote_types(values.dtype, torch.float32))


def square_of(norms: Sequence[Tensor]) -> Tensor | float:
    """Square of the norm of all, from the norm of each: a float64 scalar, where the first is; 0 without any."""
    if not norms:
        return 0.0
    return torch.stack([norm.to(norms[0].device) for norm in norms]).double().square().sum()


class GradientSquares:
    """Hooks on parameters, which cost little between `end` and `begin`.

    A hook on a leaf sees the whole gradient of a backward pass, once, before it is added to `.grad`.
    """

    def __init__(self) -> None:
        self._pass = _Pass()
        self._hooks: dict[str, Any] = {}

    def watch(self, parameters: Mapping[str, Tensor], leaf: Callable[[Any], Tensor]) -> None:
        """From now on count those that are trained and not watched yet; what was frozen may be trained later.

        Args:
            parameters: By name, always the same.
            leaf: What backward passes give a parameter's gradient to.
        """
        for name in parameters.keys() - self._hooks.keys():
            if parameters[name].requires_grad:
                self._hooks[name] = leaf(parameters[name]).register_hook(partial(_add, self._pass, name))

    def begin(self, seen: set[str]) -> None:
        """A backward pass begins.

        Args:
            seen: Names of parameters that may have no gradient any more; those that get one are added.
        """
        self._pass.norms, self._pass.seen = [], seen

    def end(self) -> Tensor | float:
        """Squared norm of all that the pass has given: a float64 scalar, or 0 if that is nothing."""
        norms, self._pass.norms = self._pass.norms or [], None
        return square_of(norms)

    def remove(self) -> None:
        """Let backward passes alone."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


class _Pass:
    """What hooks know; no model, as Python's garbage collector does not look into hooks on tensors."""

    norms: list[Tensor] | None = None
    seen: set[str]


def _add(of_pass: _Pass, name: str, gradient: Tensor) -> None:
    if of_pass.norms is None:
        return
    if name in of_pass.seen:
        raise RuntimeError(
            f"{name} gets its gradient in several parts, as by reentrant activation checkpoints, or where several "
            "stages of one rank share it: the square of their sum cannot be had from parts. Checkpoint with "
            "use_reentrant=False, give num_chunks=1, or leave out what measures the gradient noise scale."
        )
    of_pass.seen.add(name)
    of_pass.norms.append(norm_of(gradient))
