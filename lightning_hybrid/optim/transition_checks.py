"""What an `OptimizerTransition` refuses when it is made."""

from __future__ import annotations

from inspect import Parameter, signature

from torch.optim import LBFGS, Optimizer, SparseAdam


def check_alone(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot be half of a transition.

    Raises:
        ValueError: Naming it, and the way out.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"An OptimizerTransition goes from one optimizer to another, and got {optimizer!r}. Make both first, over "
            "the same parameters."
        )
    name = type(optimizer).__name__
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    given = list(signature(type(optimizer).step).parameters.values())[1:]
    needs = any(parameter.kind in kinds and parameter.default is parameter.empty for parameter in given)
    if needs or isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{name} evaluates the loss within its step, whose two halves of an OptimizerTransition have one gradient. "
            "Choose an optimizer whose step needs no arguments."
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError(
            "SparseAdam moves only rows with gradients, and an OptimizerTransition goes over whole parameters. Choose "
            "Adam, and embeddings with sparse=False."
        )
    if optimizer.defaults.get("differentiable"):
        raise ValueError(f"{name}(differentiable=True) in an OptimizerTransition: there is no gradient of its step.")
    for index, group in enumerate(optimizer.param_groups):
        if group.get("lr") is None:
            raise ValueError(
                f"Group {index} of {name} has no lr, of which an OptimizerTransition's lr is a factor. Choose an "
                "optimizer with one."
            )
    check_unscheduled(optimizer)


def check_unscheduled(optimizer: Optimizer) -> None:
    """Refuse an optimizer that a scheduler is made for: its rate is set by the transition in each step.

    Raises:
        ValueError: Naming it.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"A scheduler has been made for the {type(optimizer).__name__} of an OptimizerTransition, which it would "
            "not reach. Make it for the OptimizerTransition: its lr, 1.0 at first, is a factor of both rates."
        )


def check_pair(first: Optimizer, second: Optimizer) -> None:
    """Refuse two that have not the same parameters in the same groups.

    Raises:
        ValueError: Saying where they differ.
    """
    names = [type(optimizer).__name__ for optimizer in (first, second)]
    if first is second:
        raise ValueError(f"An OptimizerTransition from one {names[0]} to the same object: make two of them.")
    sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"An OptimizerTransition needs the same groups in both: {names[0]} has groups of {sizes[0]} parameters and "
            f"{names[1]} of {sizes[1]}. Make both from the same groups; options may differ."
        )
    for index, groups in enumerate(zip(first.param_groups, second.param_groups, strict=True)):
        for place, (one, other) in enumerate(zip(*(group["params"] for group in groups), strict=True)):
            if one is not other:
                raise ValueError(
                    f"An OptimizerTransition needs the same parameters in both: parameter {place} of group {index} has "
                    f"shape {list(one.shape)} in {names[0]} and is another one of shape {list(other.shape)} in "
                    f"{names[1]}. Make both from the same groups, in the same order."
                )
