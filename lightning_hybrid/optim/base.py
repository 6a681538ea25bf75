"""Optimizers that look at whole tensors: norms, means and factors, wherever the parts of a parameter are.

Of pytorch-optimizer 4.1, LAMB, SM3 and AdaFactor raise on DTensors, as do torch's and transformers' Adafactor (torch
2.13); none of them knows of slices that are plain tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_hybrid.compat import foreach, is_flattened
from lightning_hybrid.optim.wholes import Contribution, Dealing, Operation, local, mesh_dealings, reduce, sharded_dim


class Member(NamedTuple):
    """One parameter in a step.

    Attributes:
        parameter: It, as the group has it.
        data: The part of it that is here, in which the step writes.
        gradient: Of that part.
        state: What the optimizer keeps for it.
        dealings: How the whole is dealt out.
        shape: Shape of the whole.
    """

    parameter: Tensor
    data: Tensor
    gradient: Tensor
    state: dict[str, Any]
    dealings: Sequence[Dealing]
    shape: tuple[int, ...]

    def entry(self, name: str, collapsed: Collection[int] = ()) -> Tensor:
        """The part of a state that is here; zeros the first time.

        Args:
            name: Of the state.
            collapsed: Dimensions of the parameter that have length 1 in it.
        """
        if name not in self.state:
            self.state[name] = new_state(self.parameter, collapsed)
        return local(self.state[name])

    def part(self, value: Tensor, dims: Collection[int] | None = None) -> Contribution:
        """A value over the local part, as one of the whole's; see `Contribution`."""
        return Contribution(value, self.dealings, dims)


def advance(members: Sequence[Member]) -> list[float]:
    """Numbers of this step, from 1, among those in which each parameter had a gradient."""
    for member in members:
        if "step" not in member.state:
            member.state["step"] = torch.zeros(())
    steps = [member.state["step"] for member in members]
    if len({step.device for step in steps}) > 1:  # on the host, unless what loads states has moved some
        return [float(step.add_(1)) for step in steps]
    add(steps, 1.0)
    return torch.stack(steps).tolist()


def add(tensors: Sequence[Tensor], number: float) -> None:
    """Add a number to all; of a plain number torch makes a tensor once for each of them."""
    foreach("add_")(tensors, tensors[0].new_ones(()), alpha=number)


class Request(NamedTuple):
    """Values over local parts, of which a step needs those over whole tensors."""

    parts: Sequence[Contribution]
    operation: Operation = "sum"


Update = Generator[Request, list[Tensor], None]
"""A group's step. It yields what it has of sums, and is sent the sums over all processes."""


class WholeTensorOptimizer(Optimizer):
    """Base of optimizers whose steps need sums over whole tensors.

    The steps of all groups run side by side, so that all their sums travel in one exchange for each axis of ranks. All
    ranks of an axis step with gradients of the same parameters; our strategies and `fully_shard` see to that.

    Attributes:
        extra_dealings: Tells in each step how parameters are dealt out besides what DTensors say. A strategy sets it
            that cuts parameters into slices which are plain tensors.
        is_elementwise: Whether the step of an element needs no other one, so that flat parts of tensors do.
    """

    extra_dealings: Callable[[], Mapping[Tensor, Sequence[Dealing]]] | None = None
    is_elementwise = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._shapes: set[tuple[int, ...] | None] = set()  # of whole parameters; None stands for any
        super().__init__(params, defaults)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._shapes = getattr(self, "_shapes", set())  # a copy has not got them

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's.

        Raises:
            ValueError: If the state is one of another kind of optimizer.
        """
        check_options(self, state_dict["param_groups"])
        super().load_state_dict(state_dict)

    @abstractmethod
    def update(self, group: dict[str, Any], members: Sequence[Member]) -> Update:
        """Step with some parameters of a group that have one type and device, and gradients."""

    def collapsed(self, entry: str, shape: Sequence[int]) -> frozenset[int]:
        """Dimensions of a parameter that have length 1 in one of its states, whose others are the parameter's.

        Args:
            entry: Name of the state.
            shape: Of the whole parameter.
        """
        return frozenset()

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The loss, if there is a closure.

        Raises:
            RuntimeError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        extra = self.extra_dealings() if self.extra_dealings is not None else {}
        run([self.update(group, alike) for group in self.param_groups for alike in self._members(group, extra)])
        return loss

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            RuntimeError: If a parameter is complex, or flattened by `FullyShardedDataParallel`.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._check(parameter)
            self._shapes.add(None if is_lazy(parameter) else tuple(parameter.shape))

    def _members(self, group: dict[str, Any], extra: Mapping[Tensor, Sequence[Dealing]]) -> Iterable[list[Member]]:
        alike: dict[tuple[torch.device, torch.dtype], list[Member]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                member = self._member(parameter, extra.get(parameter, ()))
                alike.setdefault((member.data.device, member.data.dtype), []).append(member)
        return alike.values()

    def _check(self, parameter: Tensor) -> None:
        if not self.is_elementwise and is_flattened(parameter):
            raise RuntimeError(
                f"{type(self).__name__} looks at whole tensors, and FullyShardedDataParallel has flattened a parameter "
                f"to shape {list(parameter.shape)}: norms would be those of pieces. Shard with fully_shard instead "
                "(ModelParallelStrategy, or strategy='hybrid_ptdp' with zero_stage=3)."
            )
        is_sparse = parameter.grad is not None and parameter.grad.is_sparse
        if is_sparse or parameter.is_complex():
            what = "a sparse gradient" if is_sparse else "complex numbers"
            raise RuntimeError(
                f"{type(self).__name__} got a parameter of shape {list(parameter.shape)} with {what}. Use dense real "
                "ones, or torch.optim.SparseAdam for embeddings with sparse=True."
            )

    def _check_shape(self, shape: Sequence[int]) -> None:
        """Refuse what has taken the place of parameters and is none, such as DeepSpeed's flat partitions."""
        if self.is_elementwise or None in self._shapes or not self._shapes:
            return
        raise RuntimeError(
            f"{type(self).__name__} looks at whole tensors, and has got one of shape {list(shape)} in the place "
            "of those that it was made for: something has flattened them, as DeepSpeed does, and norms would be those "
            "of pieces. Use strategy='hybrid_ptdp' with zero_stage=1, 2 or 3; if shapes have changed, make a new "
            "optimizer."
        )

    def _member(self, parameter: Tensor, extra: Sequence[Dealing]) -> Member:
        gradient, here = parameter.grad, parameter.shape
        assert gradient is not None
        if here in self._shapes and not (extra or gradient.is_sparse or isinstance(parameter, DTensor)):
            return Member(parameter, parameter, gradient, self.state[parameter], (), here)  # the usual, at once
        whole = list(here)
        for dealing in extra:
            whole[dealing.dim] = dealing.length
        shape = tuple(whole)
        known = shape in self._shapes or here in self._shapes  # a second run is made for slices
        if gradient.is_sparse or not known:  # else it has been checked when it came
            self._check(parameter)
            if not known:
                self._check_shape(here)
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)  # at once if they are the same
        dealings = [*mesh_dealings(parameter), *extra]
        return Member(parameter, local(parameter), local(gradient), self.state[parameter], dealings, shape)


def run(updates: Sequence[Update]) -> None:
    """Run updates side by side: all of their requests are answered together."""
    requests = dict[int, Request]()
    answers: dict[int, list[Tensor] | None] = dict.fromkeys(range(len(updates)))
    while answers:
        requests.clear()
        for i, answer in answers.items():
            try:
                requests[i] = updates[i].send(answer) if answer is not None else next(updates[i])
            except StopIteration:
                continue
        answers = {}
        for operation in dict.fromkeys(request.operation for request in requests.values()):
            asked = {i: request.parts for i, request in requests.items() if request.operation == operation}
            found = iter(reduce([part for parts in asked.values() for part in parts], operation))
            answers |= {i: [next(found) for _ in parts] for i, parts in asked.items()}


def collapsed_dims(optimizer: Optimizer, entry: str, shape: Sequence[int]) -> frozenset[int]:
    """`WholeTensorOptimizer.collapsed` of any optimizer; none of those of others."""
    ask = getattr(optimizer, "collapsed", None)
    return ask(entry, shape) if ask is not None else frozenset()


def check_options(optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Refuse saved groups that lack options.

    Raises:
        ValueError: With what they have.
    """
    wanted = optimizer.defaults.keys() & optimizer.param_groups[0].keys()  # torch adds to defaults when it loads
    for group in saved:
        if wanted - group.keys():
            options = sorted(group.keys() - {"params", "param_names"})
            raise ValueError(
                f"The saved state has groups with the options {options} and is of no {type(optimizer).__name__}. "
                "Resume with the optimizer that was saved, or load the weights alone (load_from_checkpoint)."
            )


def new_state(parameter: Tensor, collapsed: Collection[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Zeros for a state of a parameter, sharded as that is; a sharded save needs no more.

    Args:
        parameter: A plain tensor or a DTensor.
        collapsed: Dimensions that have length 1 in the state, and all ranks have alike.
        dtype: Of the state; None takes the parameter's.
    """
    if not collapsed:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format, dtype=dtype, requires_grad=False)
    zeros = local(parameter).detach().new_zeros(collapse(local(parameter).shape, collapsed), dtype=dtype)
    return as_state(zeros, parameter, collapsed)


def as_state(part: Tensor, parameter: Tensor, collapsed: Collection[int]) -> Tensor:
    """A local part as a state of a parameter: a DTensor if that is one."""
    if not isinstance(parameter, DTensor):
        return part
    shape = torch.Size(collapse(parameter.shape, collapsed))
    stride = torch.empty(shape, device="meta").stride() if collapsed else parameter.stride()
    placements = collapse_placements(parameter.placements, collapsed)
    return DTensor.from_local(part, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def collapse_placements(placements: Sequence[Placement], dims: Collection[int]) -> list[Placement]:
    """Placements of what has length 1 in some dimensions: where those were dealt out, all ranks have the same."""
    return [p if p.is_replicate() or sharded_dim(p) not in dims else Replicate() for p in placements]


def collapse(shape: Sequence[int], dims: Collection[int]) -> tuple[int, ...]:
    """A shape with length 1 in some dimensions."""
    return tuple(1 if dim in dims else length for dim, length in enumerate(shape))
