"""Layers whose gradients a Kronecker-factored curvature preconditions: their inputs, slopes and gradients as matrices.

Each position that a layer is applied to, of a sequence or an image, counts as a row (Grosse and Martens 2016,
arXiv:1602.01407, section 3; "expand" of Eschenhagen et al. 2023, arXiv:2311.00636).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_hybrid.parallel.tensor.planning.outline import matrix, odd_lookup

KINDS = "nn.Linear, nn.Conv2d, nn.Embedding and transformers' Conv1D"


class Layer:
    """One layer.

    Attributes:
        columns: Of the gradient's matrix, and of A; with one for the bias.
        rows: Of the gradient's matrix, and of G.
        is_diagonal: A is diagonal, and kept as a vector.
        parameters: Their names in the module.
    """

    columns: int
    rows: int
    is_diagonal = False
    parameters: tuple[str, ...] = ("weight",)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What a call keeps of its arguments: inputs as rows, without the one for the bias, or numbers of rows."""
        raise NotImplementedError

    def moment(self, inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sum of the outer products of all inputs, with the bias's, and their number as a scalar."""
        raise NotImplementedError

    def counted(self, inputs: Tensor) -> Tensor | None:
        """Which rows count, as a column of ones and zeros; None for all."""
        return None

    def slopes(self, gradient: Tensor) -> Tensor:
        """Gradients with respect to outputs, as rows."""
        return gradient.flatten(0, -2) if gradient.ndim > 1 else gradient[None]

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A gradient as a matrix of `rows` x `columns`."""
        raise NotImplementedError

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `matrix` has joined: the weight's, as its shape is, and the bias's."""
        raise NotImplementedError


class Dense(Layer):
    """A linear layer: `nn.Linear`, or `Conv1D` with its transposed weight."""

    def __init__(self, module: nn.Module, num_inputs: int, num_outputs: int, *, transposed: bool) -> None:
        self.has_bias = getattr(module, "bias", None) is not None
        self.columns, self.rows = num_inputs + self.has_bias, num_outputs
        self.parameters = ("weight", "bias") if self.has_bias else ("weight",)
        self._transposed = transposed

    @override
    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found: Tensor = args[0] if args else next(iter(kwargs.values()))
        return found.detach().flatten(0, -2) if found.ndim > 1 else found.detach()[None]

    @override
    def moment(self, inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs = inputs.to(dtype)
        number = torch.tensor(float(len(inputs)), dtype=torch.float64, device=inputs.device)
        if not self.has_bias:
            return inputs.T @ inputs, number
        found = inputs.new_empty(self.columns, self.columns)
        torch.mm(inputs.T, inputs, out=found[:-1, :-1])
        found[:-1, -1] = found[-1, :-1] = inputs.sum(0)
        found[-1, -1] = len(inputs)
        return found, number

    @override
    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.T if self._transposed else weight.flatten(1)
        return weight if bias is None else torch.cat([weight, bias[:, None]], 1)

    @override
    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias = (matrix[:, :-1], matrix[:, -1]) if self.has_bias else (matrix, None)
        return weight.T if self._transposed else weight, bias


class Convolution(Dense):
    """`nn.Conv2d` of one group: a linear layer of patches."""

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module, module.weight[0].numel(), module.out_channels, transposed=False)
        self._shape = tuple(module.weight.shape)
        self._unfold = {
            "kernel_size": module.kernel_size,
            "dilation": module.dilation,
            "stride": module.stride,
        }
        self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self._padding = _padding(module)

    @override
    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found: Tensor = args[0] if args else next(iter(kwargs.values()))
        padded = F.pad(found.detach() if found.ndim == 4 else found.detach()[None], self._padding, mode=self._mode)
        return F.unfold(padded, **self._unfold).transpose(1, 2).flatten(0, 1)

    @override
    def slopes(self, gradient: Tensor) -> Tensor:
        gradient = gradient if gradient.ndim == 4 else gradient[None]
        return gradient.flatten(2).transpose(1, 2).flatten(0, 1)

    @override
    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().split(matrix)
        return weight.reshape(self._shape), bias


class Lookup(Layer):
    """`nn.Embedding`: a linear layer of indicators of tokens, whose A is diagonal: how often each comes."""

    is_diagonal = True

    def __init__(self, module: nn.Embedding) -> None:
        self.columns, self.rows = module.num_embeddings, module.embedding_dim
        self._padding = module.padding_idx

    @override
    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found: Tensor = args[0] if args else next(iter(kwargs.values()))
        return found.detach().flatten()

    @override
    def moment(self, inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        counts = torch.bincount(inputs, minlength=self.columns)
        if self._padding is not None:
            counts[self._padding] = 0  # it is not trained
        return counts.to(dtype), counts.sum().double()

    @override
    def counted(self, inputs: Tensor) -> Tensor | None:
        return None if self._padding is None else (inputs != self._padding)[:, None]

    @override
    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.T

    @override
    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        return matrix.T, None


def is_layer(module: nn.Module) -> bool:
    """Whether a module is of one of the kinds that can be layers, of whatever sizes its parameters are here."""
    is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding) or is_conv1d


def layer_of(module: nn.Module) -> Layer | str | None:
    """What a module is as a layer; a reason if it is one that cannot be; None for other modules."""
    reason = _unknown(module) if is_layer(module) else ""
    if reason:
        return reason
    found = matrix(module)
    if not isinstance(module, nn.Conv2d | nn.Embedding) and found is None:
        return None
    if isinstance(module, nn.Conv2d):
        return "it has groups" if module.groups != 1 else Convolution(module)
    if isinstance(module, nn.Embedding):
        option = odd_lookup(module)
        return f"it has {option}" if option else Lookup(module)
    assert found is not None
    return Dense(module, found.inputs, found.outputs, transposed=found.out_dim == 1)


def _unknown(module: nn.Module) -> str:
    """Why what a layer does to its weight is not known; "" if it is."""
    base = next((kind for kind in (nn.Linear, nn.Conv2d, nn.Embedding) if isinstance(module, kind)), None)
    own = dict(module.named_parameters(recurse=False))
    if any(map(nn.parameter.is_lazy, own.values())):
        return "it has no sizes before its first call; call the model once before fit"
    if "weight" not in own:
        return "its weight is made from other parameters"
    if own["weight"].is_complex():
        return "its weight is complex"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight without calling it"
    own_forward = base is not None and type(module).forward is not base.forward
    return f"{type(module).__name__} has a forward of its own" if own_forward else ""


def _padding(module: nn.Conv2d) -> list[int]:
    """What `F.pad` adds: left, right, top, bottom; "same" pads the odd one at the end, as torch does."""
    if module.padding == "valid":
        return [0, 0, 0, 0]
    if isinstance(module.padding, str):
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return [side for size in reversed(module.padding) for side in (size, size)]
