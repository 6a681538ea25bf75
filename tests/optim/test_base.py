"""What all optimizers over whole tensors refuse, and how their sums travel."""

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars
from lightning_hybrid.optim.base import Request, run
from lightning_hybrid.optim.wholes import Contribution, Dealing

KINDS = [Adafactor, Lamb, Lars, SM3]


class Axis:
    """Two ranks that have the same; keeps what it was asked for."""

    def __init__(self):
        self.asked = []

    def reduce(self, values, operation):
        self.asked.append((operation, values.tolist()))
        return values * 2 if operation == "sum" else values + 1


@pytest.mark.parametrize("kind", KINDS)
def test_complex_parameters_are_refused_when_an_optimizer_is_made(kind):
    with pytest.raises(RuntimeError, match="complex numbers"):
        kind([nn.Parameter(torch.ones(3, dtype=torch.complex64))], lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_are_refused(kind):
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = kind(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="a sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize("kind", [Adafactor, Lamb, SM3])
def test_float16_is_refused_before_anything_changes(kind):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = kind([parameter], lr=0.1)
    with pytest.raises(RuntimeError, match="Keep the parameters in float32"):
        optimizer.step()
    assert parameter.tolist() == [1, 1, 1]
    assert not optimizer.state[parameter]


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_is_called_once_with_gradients(kind):
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = kind([parameter], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9
    assert (parameter < 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_parameter_in_the_place_of_parameters_is_refused(kind):
    """As DeepSpeed does: one flat tensor for a group."""
    optimizer = kind([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2))], lr=0.1)
    flat = nn.Parameter(torch.ones(14))
    flat.grad = torch.ones(14)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(RuntimeError, match=r"one of shape \[14\] in the place"):
        optimizer.step()
    assert (flat == 1).all()


def test_parameters_that_get_their_shape_later_are_taken():
    layer = nn.LazyLinear(2)
    optimizer = Lamb(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not layer.weight.equal(before)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_another_kind_are_refused(kind):
    parameter = nn.Parameter(torch.ones(3))
    saved = torch.optim.AdamW([parameter]).state_dict()
    optimizer = kind([parameter], lr=0.1)
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"'betas'.* and is of no {kind.__name__}\."):
        optimizer.load_state_dict(saved)


def test_parts_of_all_updates_travel_together_once_for_each_axis():
    one, other = Axis(), Axis()
    answers = []

    def first():
        both = [Dealing(0, one, 4), Dealing(1, other, 4)]
        parts = [Contribution(torch.tensor(1.0), both), Contribution(torch.tensor([2.0, 3.0]), both, {1})]
        answers.append((yield Request(parts)))
        answers.append((yield Request([Contribution(torch.tensor(5.0), both, {0})], "max")))

    def second():
        answers.append((yield Request([Contribution(torch.tensor(4.0, dtype=torch.bfloat16), [Dealing(0, one, 4)])])))

    run([first(), second()])
    assert one.asked == [("sum", [1.0, 4.0]), ("max", [5.0])]
    assert other.asked == [("sum", [2.0, 2.0, 3.0])]
    assert [[value.tolist() for value in answer] for answer in answers] == [[4.0, [4.0, 6.0]], [8.0], [6.0]]
    assert answers[1][0].dtype == torch.bfloat16


def test_a_maximum_with_nan_on_another_rank_is_infinite():
    axis, found = Axis(), []

    def update():
        found.extend((yield Request([Contribution(torch.tensor([torch.nan, 1.0]), [Dealing(0, axis, 4)])], "max")))

    run([update()])
    assert axis.asked == [("max", [torch.inf, 1.0])]
    assert found[0].tolist() == [torch.inf, 2.0]
