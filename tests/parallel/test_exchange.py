"""Tokens reach the ranks that hold their experts, sorted, and what comes back lies where they lay."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.parallel.experts.exchange import TokenExchange
from tests.launch import run_ranks

SIZE, EXPERTS, DIM = 3, 6, 2
CASES = [  # how many tokens each rank has for each expert
    [[1, 2, 0, 3, 1, 0], [0, 0, 0, 0, 0, 0], [2, 0, 1, 0, 0, 4]],
    [[5, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]],
    [[0] * 6, [0] * 6, [0] * 6],
    [[1] * 6, [1] * 6, [1] * 6],
]


def tokens_of(rank, counts):
    """[P, 2]: each tells its rank and number, and its expert."""
    experts = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    return torch.stack([100.0 * rank + torch.arange(len(experts)), experts.double()], 1).double()


def travel(cases):
    rank, exchange, found = dist.get_rank(), TokenExchange(dist.group.WORLD), []
    for case in cases:
        tokens, called = tokens_of(rank, case[rank]).requires_grad_(), []
        arrived, here, back = exchange.dispatch(tokens, torch.tensor(case[rank]), partial(called.append, 1))
        factors = torch.arange(1.0, len(arrived) + 1, dtype=torch.float64)[:, None]
        returned = back(arrived * factors)
        returned.sum().backward()
        found.append((arrived.detach(), here, returned.detach(), tokens.grad, tokens.detach(), called))
    layers = [TokenExchange(dist.group.WORLD, number, f"layer {number}") for number in (0, 1)]
    with pytest.raises(RuntimeError, match=f"different layers of experts: this one layer {int(rank == 1)}, and rank"):
        layers[rank == 1].dispatch(tokens, torch.tensor(case[rank]))
    return found


def travel_beside(counts):
    """What starts and ends in a backward pass, in order: exchanges, what was computed meanwhile, gradients."""
    events, beside, start = [], [], dist.all_to_all_single
    tokens = tokens_of(dist.get_rank(), counts).requires_grad_()
    tokens.register_hook(lambda _: events.append("arrived"))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: events.append("beside"))
    sent = tokens * 1
    arrived, _, back = TokenExchange(dist.group.WORLD).dispatch(
        sent, torch.tensor(counts), lambda: beside.append(x * 2)
    )
    out = back(arrived * 2).sum() + beside[0]

    def noted(*args, **kwargs):
        events.append("start")
        return start(*args, **kwargs)

    with patch.object(dist, "all_to_all_single", noted):
        (gradient,) = torch.autograd.grad(out.sum(), [tokens], retain_graph=True)
        alone, events[:] = list(events), []
        out.sum().backward(retain_graph=True)
        together = list(events)
    twice = torch.autograd.grad(out.square(), [tokens], create_graph=True)[0].sum()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        twice.backward()
    return alone, together, torch.equal(gradient, tokens.grad) and bool((gradient == 2).all())


def test_gradients_travel_while_those_of_what_was_computed_meanwhile_are():
    for alone, events, is_right in run_ranks(SIZE, travel_beside, CASES[3][0]):
        assert alone == ["start", "start", "arrived"]
        assert events == ["start", "start", "beside", "arrived"]
        assert is_right


def test_tokens_arrive_sorted_and_return_to_their_places():
    ranks = run_ranks(SIZE, travel, CASES)
    each = EXPERTS // SIZE
    for number, case in enumerate(CASES):
        sent = torch.cat([tokens_of(rank, case[rank]) for rank in range(SIZE)])
        factor_of = {}
        for rank in range(SIZE):
            arrived, here, *_ = ranks[rank][number]
            own = [sent[sent[:, 1] == expert] for expert in range(rank * each, (rank + 1) * each)]
            assert torch.equal(arrived, torch.cat(own)), "expert by expert, and in the order of the ranks"
            assert here.tolist() == [len(tokens) for tokens in own]
            factor_of |= {float(token[0]): 1.0 + place for place, token in enumerate(arrived)}
        for rank in range(SIZE):
            _, _, returned, gradient, tokens, called = ranks[rank][number]
            factors = torch.tensor([factor_of[float(token[0])] for token in tokens], dtype=torch.float64)[:, None]
            assert torch.equal(returned, tokens * factors)
            assert torch.equal(gradient, factors.expand(-1, DIM))
            assert called == [1]
