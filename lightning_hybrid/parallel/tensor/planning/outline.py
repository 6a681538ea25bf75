"""A model as the planner sees it: modules by name, the blocks, and which modules are matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

OTHER_NORMS = ("Batch", "Group", "Instance", "Weight", "Spectral")  # not over the features of one position


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer.

    Attributes:
        inputs: Features that go in.
        outputs: Features that come out.
        out_dim: Dimension of the weight that the outputs are counted on: 0 of an `nn.Linear`, 1 of a `Conv1D`.
        biased: Whether it has a bias.
    """

    inputs: int
    outputs: int
    out_dim: int
    biased: bool


class Outline:
    """Names and modules.

    Args:
        root: The whole model.
        blocks: Dotted names of the repeated blocks.
        size: Ranks on the tensor axis.

    Attributes:
        modules: Each module once, by its first name, in registration order.
        first_names: The first name of a module, by each of its names.
        scopes: What the rules look into: the blocks, or the whole model if there are none.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[str], size: int) -> None:
        self.root, self.size = root, size
        self.modules = dict(root.named_modules())
        known = {id(module): name for name, module in self.modules.items()}
        self.first_names = {n: known[id(m)] for n, m in root.named_modules(remove_duplicate=False)}
        self.blocks = [self.first_names[block] for block in blocks]
        self.scopes = self.blocks or [""]

    def block_of(self, name: str) -> str | None:
        """The block that is the module, or has it inside."""
        return next((block for block in self.blocks if within(name, block)), None)

    def inside(self, scope: str) -> Iterator[str]:
        """The module itself and all in it, by first names."""
        return (name for name in self.modules if within(name, scope))

    def children(self, name: str) -> list[str]:
        """Modules that a module holds itself, in registration order."""
        return [self.first_names[join(name, child)] for child, _ in self.modules[name].named_children()]

    def matrices(self, name: str) -> list[str]:
        """Linear layers that a module holds itself, in registration order."""
        return [child for child in self.children(name) if self.matrix(child)]

    def matrix(self, name: str) -> Matrix | None:
        """What the module is as a linear layer, or None."""
        return matrix(self.modules[name])

    def known_matrix(self, name: str) -> Matrix:
        """The same of a module that is one."""
        found = self.matrix(name)
        assert found is not None
        return found

    def unit(self, name: str, busy: set[str]) -> str:
        """The largest module around one that lies below its block and holds none of `busy`; else the module."""
        scope = self.block_of(name)
        found = name
        while scope is not None and name != scope and not any(within(other, name) for other in busy):
            found, name = name, parent(name)
        return found


def matrix(module: nn.Module) -> Matrix | None:
    """What a module is as a linear layer: an `nn.Linear`, or transformers' `Conv1D`, whose weight is (in, out)."""
    own = dict(module.named_parameters(recurse=False))
    weight, biased = own.get("weight"), own.get("bias") is not None
    if weight is None or nn.parameter.is_lazy(weight) or weight.ndim != 2:
        return None
    if isinstance(module, nn.Linear) and weight.shape == (module.out_features, module.in_features):
        return Matrix(module.in_features, module.out_features, 0, biased)
    if type(module).__name__ == "Conv1D" and weight.shape[1] == getattr(module, "nf", None):
        return Matrix(weight.shape[0], weight.shape[1], 1, biased)
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises the features of each position, by its class or its class's name."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    kind = type(module).__name__
    return kind.endswith("Norm") and not any(other in kind for other in OTHER_NORMS)


def odd_lookup(module: nn.Embedding) -> str:
    """The option of an embedding that keeps its rows from being dealt out, or nothing."""
    options = {"max_norm": module.max_norm, "scale_grad_by_freq": module.scale_grad_by_freq, "sparse": module.sparse}
    return next((f"{name}={value}" for name, value in options.items() if value), "")


def own_parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a module holds itself."""
    return tuple(name for name, _ in module.named_parameters(recurse=False))


def within(name: str, scope: str) -> bool:
    """Whether a dotted name is `scope` or lies in it."""
    return not scope or f"{name}.".startswith(f"{scope}.")


def parent(name: str) -> str:
    """Dotted name of what holds a module."""
    return name.rpartition(".")[0]


def last(name: str) -> str:
    """A module's name in what holds it."""
    return name.rpartition(".")[2]


def join(scope: str, name: str) -> str:
    """Dotted name of a module in `scope`."""
    return f"{scope}.{name}" if scope and name else scope or name
