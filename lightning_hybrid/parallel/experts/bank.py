"""What a strategy knows of experts: a module that computes them all, with parameters stacked over the experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.func import functional_call

from lightning_hybrid.parallel.experts.exchange import TokenExchange


class ExpertBank(nn.Module, ABC):
    """Experts of one layer. Dimension 0 of each parameter counts them.

    Args:
        num_experts: Of the whole layer.

    Attributes:
        num_experts: The same.
        exchange: Set by a strategy that has split the experts over ranks; None where all are here.
        wholes: Set by it for a while: the parameters of all experts, by name, with which tokens stay here.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.exchange: TokenExchange | None = None
        self.wholes: Mapping[str, Tensor] | None = None

    def forward(self, tokens: Tensor, counts: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Send each token through its expert, wherever that is.

        Args:
            tokens: [P, D], sorted by expert; P may be 0.
            counts: [num_experts], int64: how many each expert gets.
            meanwhile: What needs none of these tokens; called once, while they are on their way.

        Returns:
            [P, D], in the order of the tokens.
        """
        if self.wholes is not None:
            if meanwhile is not None:
                meanwhile()
            wholes = {f"bank.{name}": whole for name, whole in self.wholes.items()}
            outputs: Tensor = functional_call(_Computing(self), wholes, (tokens, counts))
            return outputs
        if self.exchange is None:
            if meanwhile is not None:
                meanwhile()
            return self.compute(tokens, counts)
        arrived, here, back = self.exchange.dispatch(tokens, counts, meanwhile)
        return back(self.compute(arrived, here))

    @abstractmethod
    def compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send tokens through the experts that are here.

        All parameters take part, so that each has a gradient, of zeros where its expert got no token.

        Args:
            tokens: [R, D], sorted by expert; R may be 0.
            counts: Of each expert that is here, how many it gets; as many as dimension 0 of the parameters.

        Returns:
            [R, D].
        """


class _Computing(nn.Module):
    """Calls `compute` without the hooks of the module itself, which know parameters of this rank only."""

    def __init__(self, bank: ExpertBank) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        return self.bank.compute(tokens, counts)
