"""Experts of transformers' models, and of others that keep their protocol, as something that a strategy can split.

From its version 5 on, transformers stacks the experts of a layer in one module, whose forward takes tokens [T, D], the
numbers of each one's experts [T, k] and their weights [T, k], and returns the weighted sums, [T, D]. It is asked for
pairs of a token and an expert on the rank that has the expert, so that what it computes with, a loop or a grouped
product, stays its own. As a gate does, this swaps the module's class for a subclass, and changes nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_hybrid.parallel.experts.exchange import TokenExchange

PROTOCOL = ({"hidden_states"}, {"top_k_index", "router_indices"}, {"top_k_weights", "routing_weights"})
"""Names of a forward's arguments, which say what they mean."""


class PublishedBank(nn.Module):
    """Goes before the class of a module that keeps the protocol.

    Attributes:
        num_experts: Of the whole layer, but while the module's own forward runs on those that are here.
        exchange: Set by a strategy that has split the experts over ranks; None where all are here.
        wholes: Set by it for a while: the parameters of all experts, by name, with which tokens stay here.
    """

    num_experts: int
    exchange: TokenExchange | None = None
    wholes: Mapping[str, Tensor] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Send each token through its experts, wherever they are."""
        if self.wholes is not None:
            wholes = {f"bank.{name}": whole for name, whole in self.wholes.items()}
            outputs: Tensor = functional_call(_Own(self), wholes, args, kwargs)
            return outputs
        if self.exchange is None:
            return self.own_forward(*args, **kwargs)
        bound = inspect.signature(super().forward).bind(*args, **kwargs)
        return self._travel(*bound.arguments.values(), exchange=self.exchange)

    def own_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module's own class computes, with as many experts as `num_experts` says."""
        outputs: Tensor = super().forward(*args, **kwargs)
        return outputs

    def _travel(self, x: Tensor, index: Tensor, weights: Tensor, *, exchange: TokenExchange) -> Tensor:
        experts, order = index.reshape(-1).sort(stable=True)
        counts = torch.bincount(experts, minlength=self.num_experts)[: self.num_experts]
        order = order[: int(counts.sum())]  # a number past the last means no expert
        arrived, here, back = exchange.dispatch(x.flatten(0, -2).index_select(0, order // index.shape[-1]), counts)
        outputs = back(self._compute(arrived, here)) * weights.reshape(-1)[order, None]
        pairs = outputs.new_zeros(index.numel(), x.shape[-1]).index_copy(0, order, outputs)
        return pairs.view(-1, index.shape[-1], x.shape[-1]).sum(1).to(x.dtype).view(x.shape)

    def _compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """As `ExpertBank.compute`: [R, D], sorted by expert, through those that are here."""
        if not len(tokens):  # the module would leave parameters, and what sent nothing here, without gradients
            return tokens + sum(parameter[:0].sum().to(tokens.dtype) for parameter in self.parameters())
        numbers = torch.arange(len(counts), device=tokens.device).repeat_interleave(counts)
        whole, self.num_experts = self.num_experts, len(counts)
        try:
            return self.own_forward(tokens, numbers[:, None], tokens.new_ones(len(tokens), 1))
        finally:
            self.num_experts = whole


class _Own(nn.Module):
    """Calls the module's own forward without its hooks, which know parameters of this rank only."""

    def __init__(self, bank: PublishedBank) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.bank.own_forward(*args, **kwargs)


def adopt_published(root: nn.Module) -> None:
    """Make banks of all modules that keep the protocol.

    Raises:
        ValueError: If one of them has something that is not stacked over its experts, or may not be asked for them.
    """
    for name, module in root.named_modules():
        if _keeps_protocol(module) and not isinstance(module, PublishedBank):
            obstacle = _obstacle(module, root.get_submodule(name.rpartition(".")[0]))
            if obstacle:
                raise ValueError(
                    f"The experts of {name} ({type(module).__name__}) cannot be split: {obstacle}. Set "
                    "expert_parallel_size=1."
                )
            module.__class__ = _bank_class(type(module))


def unknown_experts(root: nn.Module) -> str:
    """What a model without banks has that seems to be experts, and why they are not known; empty if nothing does."""
    for name, module in root.named_modules():
        kind = f"{name} ({type(module).__name__})"
        members = len(module) if isinstance(module, nn.ModuleList | nn.ModuleDict) else 0
        if members > 1 and "expert" in name.rpartition(".")[2]:
            return (
                f"{kind} has {members} experts as modules of their own, and only experts whose parameters are stacked, "
                "[num_experts, ...], can be split."
            )
        if "expert" in type(module).__name__.lower() and next(module.parameters(recurse=False), None) is not None:
            return (
                f"{kind} has num_experts={getattr(module, 'num_experts', None)} and forward({_arguments(module)}), "
                "and known are experts with num_experts and forward(hidden_states, top_k_index, top_k_weights)."
            )
    return ""


def _keeps_protocol(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    names = _arguments(module).split(", ")
    return len(names) == len(PROTOCOL) and all(name in known for name, known in zip(names, PROTOCOL, strict=True))


def _arguments(module: nn.Module) -> str:
    return ", ".join(list(inspect.signature(type(module).forward).parameters)[1:])


def _obstacle(module: nn.Module, parent: nn.Module) -> str:
    """What a share of the experts would not have, or who might not ask the module for them."""
    for name, tensor in module.named_parameters():
        if tensor.ndim < 1 or len(tensor) != module.num_experts:
            return (
                f"{name} is {list(tensor.shape)}, and dimension 0 of all its parameters must count its "
                f"num_experts={module.num_experts}"
            )
    if next(module.parameters(), None) is None:
        return "it has no parameters"
    if next(module.buffers(), None) is not None:
        return f"it has buffers ({', '.join(name for name, _ in module.named_buffers())}), which are not split"
    if "forward" in vars(module) or "forward" in vars(parent):  # an optimised kernel of the whole layer, say
        return "its forward, or that of the layer around it, was replaced after it was made"
    return ""


def _bank_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a class, one for all its modules: torch.compile makes code for each class of `self`."""
    for derived in base.__subclasses__():
        if derived.__bases__ == (PublishedBank, base):
            return derived
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (PublishedBank, base), names)
