"""Feed-forward experts of one layer: stacked parameters, one grouped product or a loop over the experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hybrid.parallel.experts.bank import ExpertBank

Activation = Literal["gelu", "relu", "silu", "swiglu"] | Callable[[Tensor], Tensor]
Implementation = Literal["auto", "grouped", "loop"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "swiglu": functional.silu,  # of the gate, which multiplies the other half
}
IMPLEMENTATIONS = ("auto", "grouped", "loop")
ALIGNMENT = 16  # bytes: torch.nn.functional.grouped_mm takes rows that are multiples of it, and starts of tensors


def activation_of(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The function of that name, or the given one.

    Raises:
        ValueError: If the name is unknown.
    """
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation={activation!r} is unknown: choose one of {names}, or give a function.")
    return ACTIVATIONS[activation]


class Experts(ExpertBank):
    """E feed-forward networks: down(activation(up x)), or down(silu(gate x) * up x) for "swiglu" (arXiv:2002.05202).

    Args:
        dim: D, the width of a token.
        hidden_dim: H.
        num_experts: E.
        activation: A name, or a function on [R, H] that treats each row alike.
        bias: Add one to each product.
        implementation: How products are computed. "grouped" is `torch.nn.functional.grouped_mm`, "loop" one product an
            expert; "auto" is grouped where it can be.

    Attributes:
        up: [E, H, D]; `up_bias` [E, H]. As each expert's `nn.Linear` would have it, in values too.
        gate: The same for "swiglu", else None.
        down: [E, D, H]; `down_bias` [E, D].

    Raises:
        ValueError: If a size is below 1 or a name unknown.
    """

    gate: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        activation: Activation = "gelu",
        *,
        bias: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__(num_experts)
        for name, size in (("dim", dim), ("hidden_dim", hidden_dim), ("num_experts", num_experts)):
            if size < 1:
                raise ValueError(f"{name}={size} leaves nothing to compute: give at least 1.")
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation={implementation!r} is unknown: choose one of {IMPLEMENTATIONS}.")
        self.dim, self.hidden_dim, self.implementation = dim, hidden_dim, implementation
        self.activation = activation_of(activation)
        shapes = {"up": (hidden_dim, dim), "gate": (hidden_dim, dim), "down": (dim, hidden_dim)}
        for name, (rows, columns) in shapes.items():
            is_used = name != "gate" or activation == "swiglu"
            weight = nn.Parameter(torch.empty(num_experts, rows, columns)) if is_used else None
            self.register_parameter(name, weight)
            self.register_parameter(
                f"{name}_bias", nn.Parameter(torch.empty(num_experts, rows)) if is_used and bias else None
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each expert as `nn.Linear` does its weight and bias: uniform within 1 / sqrt(inputs)."""
        for name, parameter in self.named_parameters(recurse=False):
            bound = 1 / math.sqrt(self.hidden_dim if name.startswith("down") else self.dim)
            for expert in range(len(parameter)):  # one after the other: a stack would be drawn in another order
                nn.init.uniform_(parameter.detach()[expert], -bound, bound)

    def compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send tokens through the experts that are here; see `ExpertBank.compute`."""
        tokens = _autocast(tokens)
        reason = self._why_not_grouped(tokens) if self.implementation != "loop" else ""
        if reason and self.implementation == "grouped":
            raise ValueError(f'implementation="grouped" cannot compute {reason}: choose "auto" or "loop".')
        linear: Callable[..., Tensor]
        if self.implementation == "loop" or reason:
            linear = partial(_linear_of_each, sizes=counts.tolist())
        else:
            linear = partial(_linear_grouped, counts=counts, ends=counts.cumsum(0).to(torch.int32))
        hidden = self._linear(linear, tokens, "up")
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(self._linear(linear, tokens, "gate")) * hidden
        return self._linear(linear, hidden, "down")

    def _linear(self, linear: Callable[..., Tensor], x: Tensor, name: str) -> Tensor:
        bias: Tensor | None = getattr(self, f"{name}_bias")
        return linear(_autocast(x), _autocast(getattr(self, name)), None if bias is None else _autocast(bias))

    def _why_not_grouped(self, tokens: Tensor) -> str:
        """What `grouped_mm` does not take; "" if it takes everything."""
        if tokens.device.type not in ("cpu", "cuda"):
            return f"on the device {tokens.device}"
        if tokens.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"in {tokens.dtype}"
        for name, size in (("dim", self.dim), ("hidden_dim", self.hidden_dim)):
            if size * tokens.element_size() % ALIGNMENT:
                return f"{name}={size} in {tokens.dtype}, which are not a multiple of {ALIGNMENT} bytes"
        return ""

    def extra_repr(self) -> str:
        """What is printed."""
        return f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}"


class DenseMLP(nn.Module):
    """A feed-forward network for all tokens, with the equations of one of the `Experts`.

    Args:
        dim: D, the width of a token.
        hidden_dim: H.
        activation: As for `Experts`.
        bias: As for `Experts`.
    """

    def __init__(self, dim: int, hidden_dim: int, activation: Activation = "gelu", *, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation_of(activation)
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.gate = nn.Linear(dim, hidden_dim, bias=bias) if activation == "swiglu" else None
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


def _autocast(x: Tensor) -> Tensor:
    """As autocast gives it to `F.linear`; it does not know `grouped_mm`, and leaves float64 alone."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _linear_of_each(x: Tensor, weight: Tensor, bias: Tensor | None, *, sizes: list[int]) -> Tensor:
    """Each run of rows times the transposed matrix of its expert.

    Experts without rows take part, so that they have gradients. `unbind` puts those of all into one tensor once; an
    index each would make a tensor of zeros each.
    """
    biases = [None] * len(sizes) if bias is None else bias.unbind(0)
    rows = zip(x.split(sizes), weight.unbind(0), biases, strict=True)
    return torch.cat([functional.linear(*each) for each in rows])


def _linear_grouped(x: Tensor, weight: Tensor, bias: Tensor | None, *, counts: Tensor, ends: Tensor) -> Tensor:
    """The same in one call."""
    out: Tensor = _DenseGradient.apply(_product(x, weight, ends))
    return out if bias is None else out + bias.repeat_interleave(counts, dim=0, output_size=len(x))


def _product_as_written(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(_dense(x), _dense(weight).transpose(1, 2), offs=ends)


# torch.compile knows it for bfloat16 only (torch 2.13)
_product = torch.compiler.disable(_product_as_written)


def _dense(x: Tensor) -> Tensor:
    """The tensor, or a copy that `grouped_mm` takes.

    A tensor with one row or none may be contiguous in torch's eyes whatever its strides are, and parameters in a buffer
    of several may start anywhere, which devices do not take.
    """
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    if x.stride() != tuple(strides) or (x.is_cuda and x.data_ptr() % ALIGNMENT):
        return x.clone(memory_format=torch.contiguous_format)
    return x


class _DenseGradient(torch.autograd.Function):
    """Identity; `grouped_mm` refuses gradients that are expanded, such as that of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _dense(gradients[0])
