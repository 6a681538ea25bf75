"""What tensor parallelism has made of one rank's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.functional.trees import leaves_of, map_leaves
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.axis import TensorAxis
from lightning_hybrid.parallel.tensor.functions import step_surroundings
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, whole


class TensorParallel:
    """Holds the slices of a whole model's parameters, and leads back to the whole.

    Args:
        root: The whole model, changed in place: each split parameter keeps its identity and gets its slice as data.
        assignments: The plan.
        axis: The ranks.

    Attributes:
        splits: By parameter name, second names of shared ones too.
        deferred: Names of whole parameters whose gradients are summed over the axis at the end of a window.
    """

    def __init__(self, root: nn.Module, assignments: Sequence[Assignment], axis: TensorAxis) -> None:
        self.axis = axis
        by_parameter: dict[int, Split] = {}
        deferred: set[int] = set()
        for assignment in assignments:
            module = root.get_submodule(assignment.module)
            by_parameter |= {id(module.get_parameter(n)): split for n, split in assignment.splits.items()}
            deferred |= {id(module.get_parameter(name)) for name in assignment.deferred}
        named = list(root.named_parameters(remove_duplicate=False))
        self.splits = {name: by_parameter[id(p)] for name, p in named if id(p) in by_parameter}
        self.deferred = frozenset(name for name, p in named if id(p) in deferred)
        cut = set[int]()
        for name, parameter in named:
            if name in self.splits and id(parameter) not in cut:
                cut.add(id(parameter))
                parameter.data = self.part(name, parameter.data)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step."""
        with self.axis.step(), step_surroundings():
            yield

    def part(self, name: str, whole: Any) -> Any:
        """This rank's slice of a whole value of a parameter, or of an optimizer's state of the same shape."""
        split = self.splits.get(name)
        if split is None or not isinstance(whole, Tensor) or whole.ndim <= split.dim:
            return whole
        if whole.shape[split.dim] != split.length:
            return whole
        return split.take(whole, self.axis.size, self.axis.rank).clone(memory_format=torch.contiguous_format)

    def whole(self, name: str, part: Tensor, device: torch.device) -> Tensor:
        """The whole of a value that is dealt out as its parameter, if that is split; all ranks of the axis call it.

        Args:
            name: The parameter's.
            part: This rank's slice, in any memory; not sharded over the data axis any more.
            device: Where the axis communicates.
        """
        split = self.splits.get(name)
        return part if split is None else self.axis.gather(part.detach().to(device), split)


def refuse_outside_steps(root: nn.Module, tensor: TensorParallel) -> None:
    """Let modules with slices raise where they are called outside a step: they would compute with the slices alone."""
    for name in dict.fromkeys(name.rpartition(".")[0] for name in tensor.splits):
        root.get_submodule(name).register_forward_pre_hook(partial(_check_active, tensor.axis, name), prepend=True)


def _check_active(axis: TensorAxis, name: str, module: nn.Module, args: object) -> None:
    if not axis.active:
        raise RuntimeError(
            f"{name} was called outside a step, and each of {axis.size} ranks holds a slice of it. Call the model only "
            "inside training_step, validation_step, test_step and predict_step."
        )


def whole_tree(tree: Any) -> Any:
    """Nested containers with split tensors made whole, for code that knows nothing of them; the axis calls it together.

    Others are returned as they are.
    """
    return map_leaves(whole, tree) if any(isinstance(leaf, SplitTensor) for leaf in leaves_of(tree)) else tree
