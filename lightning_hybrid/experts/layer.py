"""A sparsely gated layer for any model: router, capacity, experts, and the losses that keep experts in balance."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.experts.balance import BalanceOver, PairCounts, balance_loss
from lightning_hybrid.experts.bank import Activation, DenseMLP, Experts, Implementation
from lightning_hybrid.experts.loss_free import LossFree
from lightning_hybrid.experts.passes import Pass, current_pass
from lightning_hybrid.experts.router import Router, check_coefficients
from lightning_hybrid.experts.routers import ExpertChoice, NoisyTopK, make_router
from lightning_hybrid.experts.statistics import RoutingStatistics
from lightning_hybrid.functional.routing import Assignment, Rounding, capacity_of, counts_of, keep_first
from lightning_hybrid.parallel.pipeline.auxiliary import add_auxiliary_loss

BALANCED = (NoisyTopK, ExpertChoice, LossFree)  # routers that keep the balance by themselves


class MoELayer(nn.Module):
    """A mixture of experts in place of a feed-forward network: [..., D] to [..., D].

    Each token is computed by the experts that the router gives it, and their outputs are added with the router's
    weights. Dimension 0 of an input of three or more dimensions counts sequences; [T, D] is one sequence.

    In training the layer adds its losses to the total by itself, with `add_auxiliary_loss`: neither its output nor the
    loss that a step returns or logs contains them. `statistics` has their values.

    Args:
        dim: D, the width of a token.
        hidden_dim: H, of each expert.
        num_experts: E.
        router: "topk", "noisy_topk", "switch", "gshard", "expert_choice" or "loss_free", or a `Router`.
        top_k: Experts of each token; None for the router's default, which is 2, and 1 for "switch".
        capacity_factor: An expert takes capacity_factor * T * top_k / E pairs of the T tokens of a group, in the order
            of the router, and the others are dropped: there its output is 0, and the token goes on through the model's
            residual connection (arXiv:2101.03961, section 2.2). None drops nothing.
        capacity_rounding: "floor" or "ceil".
        min_capacity: The least that an expert takes, whatever the factor says; None refuses a capacity of 0.
        shared_experts: How many experts compute every token, as one dense network of this times H (arXiv:2401.06066).
        activation: "gelu", "relu", "silu", "swiglu", or a function that treats each row of [R, H] alike.
        bias: Of the experts' products.
        balance_loss: Coefficient of the balance loss; 0 for none. None is 0.01 (arXiv:2101.03961, section 2.2), and 0
            with "noisy_topk", "expert_choice" and "loss_free", which balance in ways of their own.
        balance_over: Which pairs its fractions are counted over, before dropping: those of one "sequence", of the
            "micro_batch" on all replicas, or "global", of the accumulation window so far on all replicas.
        implementation: "grouped" products (`torch.nn.functional.grouped_mm`), a "loop" over the experts, or "auto".

    Attributes:
        router: The `Router`.
        experts: The `ExpertBank`.
        shared: The dense network beside them, or None.
        statistics: What training passes have done since `statistics.reset()`.
        reduces: False while replicas run apart, as in a dry run: a pass then counts alone, for itself only.

    Raises:
        ValueError: If an argument is out of its range, two do not fit each other, or a name is unknown; in a call, if
            the capacity is 0.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        router: str | Router = "topk",
        top_k: int | None = None,
        *,
        capacity_factor: float | None = None,
        capacity_rounding: Rounding = "floor",
        min_capacity: int | None = None,
        shared_experts: int = 0,
        activation: Activation = "gelu",
        bias: bool = False,
        balance_loss: float | None = None,
        balance_over: BalanceOver = "sequence",
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__()
        check_coefficients(balance_loss=balance_loss or 0.0)
        _check_capacity(capacity_factor, capacity_rounding, min_capacity)
        if shared_experts < 0:
            raise ValueError(f"shared_experts={shared_experts} is no number of experts: give 0 for none.")
        self.dim, self.num_experts = dim, num_experts
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity
        self.capacity_rounding: Rounding = capacity_rounding
        self.router = _router_of(router, dim, num_experts, top_k)
        _check_choice(self.router, capacity_factor)
        self.experts = Experts(dim, hidden_dim, num_experts, activation, bias=bias, implementation=implementation)
        self.shared = DenseMLP(dim, shared_experts * hidden_dim, activation, bias=bias) if shared_experts else None
        usual = 0.0 if isinstance(self.router, BALANCED) else 0.01
        self.coefficient, self.reduces = usual if balance_loss is None else balance_loss, True
        self.statistics = RoutingStatistics(num_experts)
        self._pairs = PairCounts(balance_over)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D].

        Raises:
            ValueError: If the last dimension is another, or an expert's capacity would be 0.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"The input has shape {list(x.shape)}, and the layer is for tokens of dim={self.dim}.")
        out: Tensor = _compute(self, x)
        return out

    def compute(self, x: Tensor) -> Tensor:
        """What `forward` is, without its check."""
        tokens = x.reshape(-1, self.dim)
        num_sequences = x.shape[0] if x.ndim > 2 and len(tokens) else 1
        assignment = self.router(tokens, num_sequences)
        kept = self._within_capacity(assignment, num_sequences)
        out, counts = self._mix(tokens, assignment, kept)
        return self._account(out.view(x.shape), assignment, num_sequences, counts)

    def _within_capacity(self, assignment: Assignment, num_sequences: int) -> Tensor | None:
        """Numbers of the pairs that stay; None for all."""
        if self.capacity_factor is None or not len(assignment.probabilities):
            return None
        num_groups = self.router.num_groups(num_sequences)
        num_tokens = len(assignment.probabilities) // num_groups
        top_k, least = self.router.top_k, self.min_capacity or 0
        capacity = capacity_of(num_tokens, self.num_experts, top_k, self.capacity_factor, self.capacity_rounding, least)
        if not capacity:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} of {num_tokens} tokens with top_k={top_k} leaves "
                f"{self.num_experts} experts a capacity of 0: raise it, or give min_capacity=1 or "
                'capacity_rounding="ceil".'
            )
        return keep_first(assignment, self.num_experts, capacity, num_groups).nonzero().squeeze(1)

    def _mix(self, tokens: Tensor, assignment: Assignment, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weighted sum of what the experts make of the tokens, [T, D], and how many tokens each got, [E]."""
        numbers, experts, weights = assignment.tokens, assignment.experts, assignment.weights
        if kept is not None:
            numbers, experts, weights = numbers[kept], experts[kept], weights.index_select(0, kept)
        experts, order = experts.sort(stable=True)
        numbers, weights = numbers[order], weights.index_select(0, order)
        counts = counts_of(experts, self.num_experts)
        beside: list[Tensor] = []
        made = self.experts(tokens.index_select(0, numbers), counts, lambda: beside.extend(self._shared(tokens)))
        weighted = made * weights[:, None]  # in the wider type of the two, which sums over a token's experts keep
        out = weighted.new_zeros(len(tokens), self.dim).index_add(0, numbers, weighted).to(made.dtype)
        for output in beside:
            if torch.is_grad_enabled() and not output.requires_grad and self._trains_shared():
                raise RuntimeError(
                    "The experts ran without gradients, in a checkpoint of their own that leaves out the shared "
                    "experts. Checkpoint the whole layer, or give use_reentrant=False."
                )
            out = out + output
        return out, counts

    def _shared(self, tokens: Tensor) -> list[Tensor]:
        return [] if self.shared is None else [self.shared(tokens)]

    def _trains_shared(self) -> bool:
        return self.shared is not None and any(parameter.requires_grad for parameter in self.shared.parameters())

    def _account(self, out: Tensor, assignment: Assignment, num_sequences: int, kept: Tensor) -> Tensor:
        """Count a training pass, and add its losses to the output."""
        at = current_pass() if self.training else Pass.OTHER
        if at is Pass.OTHER:
            return out
        length = max(len(assignment.probabilities) // num_sequences, 1)
        queues = assignment.tokens // length * self.num_experts + assignment.experts
        counts = counts_of(queues, num_sequences * self.num_experts).view(num_sequences, self.num_experts)
        losses = dict(assignment.losses)
        if self.coefficient:
            pairs = self._counted(at, assignment.experts, counts)
            if pairs is not None:
                losses["balance"] = self.coefficient * balance_loss(assignment.probabilities, pairs)
        if at is not Pass.RECOMPUTED and self.reduces:
            self.statistics.add(counts.sum(0), kept, assignment.probabilities, losses)
        for loss in losses.values() if torch.is_grad_enabled() else ():
            out = add_auxiliary_loss(out, loss)
        return out

    def _counted(self, at: Pass, experts: Tensor, counts: Tensor) -> Tensor | None:
        """The counts for the balance loss; None in the recomputation of a pass that has added it."""
        if self._pairs.over == "sequence":
            return counts
        if not self.reduces:
            return counts.sum(0, keepdim=True)
        if at is Pass.RECOMPUTED:
            return self._pairs.recall(experts)
        counted = self._pairs.count(counts)
        if at is Pass.AHEAD:
            self._pairs.keep(experts, counted)
        return counted

    def start_window(self) -> None:
        """Begin an accumulation window: `balance_over="global"` counts from here."""
        self._pairs.start_window()

    @property
    def counts_windows(self) -> bool:
        """Counts belong to a window."""
        return self.balance_over == "global"

    def window_counts(self, *, first: bool) -> Tensor:
        """Those of the window so far over all ranks, on the first of them, else zeros, [E]."""
        counts = self._pairs.window if first else None
        return torch.zeros(self.num_experts, dtype=torch.int64) if counts is None else counts

    def resume_window(self, counts: Tensor, *, first: bool) -> None:
        """Go on from there, which every rank does."""
        self._pairs.window = counts

    @property
    def balance_over(self) -> BalanceOver:
        """What the balance loss is counted over."""
        return self._pairs.over

    @property
    def balance_group(self) -> dist.ProcessGroup | None:
        """The replicas over which it is counted; None, as without a strategy, for this process alone."""
        return self._pairs.group

    @balance_group.setter
    def balance_group(self, group: dist.ProcessGroup | None) -> None:
        self._pairs.group = group

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "The losses of a MoELayer are part of the total already, by add_auxiliary_loss: leave them out of the "
            "step's loss. layer.statistics.losses has their values for logging."
        )

    aux_loss = auxiliary_loss = balance_loss = l_aux = property(_refuse, doc="Refused: the total has it already.")

    def extra_repr(self) -> str:
        """What is printed."""
        return f"capacity_factor={self.capacity_factor}, balance={self.coefficient} over {self.balance_over}"


def _compute_as_written(layer: MoELayer, x: Tensor) -> Tensor:
    return layer.compute(x)


# shapes depend on what is routed where, and compiled code would keep what is counted
_compute = torch.compiler.disable(_compute_as_written)


def _router_of(router: str | Router, dim: int, num_experts: int, top_k: int | None) -> Router:
    if isinstance(router, Router):
        given: dict[str, Any] = {"dim": dim, "num_experts": num_experts, "top_k": top_k}
        for name, value in given.items():
            if value is not None and value != getattr(router, name):
                raise ValueError(
                    f"The layer has {name}={value}, and its router {name}={getattr(router, name)}: give both the same."
                )
        return router
    return make_router(router, dim, num_experts, top_k=top_k)


def _check_capacity(factor: float | None, rounding: Rounding, minimum: int | None) -> None:
    """Refuse what is no capacity, and a part of one where there is none."""
    if factor is None and minimum is not None:
        raise ValueError(
            f"min_capacity={minimum} without a capacity_factor limits nothing: no token is dropped. Give a "
            "capacity_factor, or leave min_capacity out."
        )
    capacity_of(1, 1, 1, 1.0 if factor is None else factor, rounding, minimum or 0)


def _check_choice(router: Router, capacity_factor: float | None) -> None:
    """Refuse a second capacity where experts choose tokens, and say what that means."""
    if isinstance(router, ExpertChoice) and capacity_factor is not None:
        raise ValueError(
            f"capacity_factor={capacity_factor} of the layer would drop tokens that experts have chosen: give it to "
            "the router, ExpertChoice(dim, num_experts, capacity_factor=...)."
        )
    if not router.is_causal:
        warnings.warn(
            f"{type(router).__name__} is not causal: a token's experts depend on later tokens, so that a model which "
            "predicts the next token sees the future in training, and cannot when it generates. Use it in encoders, "
            "or another router.",
            stacklevel=3,
        )
