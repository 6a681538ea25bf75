import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid import add_auxiliary_loss
from lightning_hybrid.parallel.pipeline.auxiliary import auxiliary_listener, auxiliary_weight


def leaf(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_values_pass_unchanged_and_the_loss_is_not_added_to_them():
    x, w = leaf(1.0, 2.0), leaf(3.0)
    out = add_auxiliary_loss(x, w.square().mean())
    assert out.tolist() == [1, 2]
    assert out.requires_grad


@settings(max_examples=20)
@given(weight=st.sampled_from([0.0, 0.25, 1.0, 7.0]))
def test_gradients_are_those_of_the_weighted_sum(weight):
    x, w = leaf(1.0, 2.0), leaf(3.0)
    with auxiliary_weight(weight):
        loss = add_auxiliary_loss(x * w, w.square().mean()).sum()
        loss.backward(torch.tensor(weight))  # the executor seeds the loss with the same weight
    assert w.grad.item() == weight * (1 + 2 + 2 * 3)
    assert x.grad.tolist() == [3 * weight, 3 * weight]


def test_without_a_pipeline_the_weight_is_one():
    w = leaf(3.0)
    add_auxiliary_loss(leaf(1.0), w.square().sum()).sum().backward()
    assert w.grad.item() == 6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_code_asks_for_the_weight_at_each_backward():
    function = torch.compile(lambda x, w: add_auxiliary_loss(x * w, w.square().mean()) * 2, backend="aot_eager")
    for weight in (1.0, 0.25, 7.0):
        x, w = leaf(1.0, 2.0), leaf(3.0)
        loss = function(x, w).sum()  # the weight is known only later, as in a pipeline
        with auxiliary_weight(weight):
            loss.backward()
        assert w.grad.item() == 2 * (1 + 2) + weight * 2 * 3


def test_several_losses_of_several_blocks_add_up():
    w, x = leaf(2.0), leaf(1.0)
    for factor in (1, 10, 100):
        x = add_auxiliary_loss(x, (factor * w).sum())
    with auxiliary_weight(0.5):
        (3 * x).sum().backward()
    assert w.grad.item() == 55.5


def test_the_weight_is_that_of_the_backward_pass_and_not_of_the_forward():
    w = leaf(1.0)
    with auxiliary_weight(100.0):
        x = add_auxiliary_loss(leaf(1.0), 1 * w.sum())
    with auxiliary_weight(0.5), auxiliary_weight(0.25):
        x.sum().backward()
    assert w.grad.item() == 0.25


def test_the_outer_weight_returns_after_an_error():
    w = leaf(1.0)
    with auxiliary_weight(0.5):
        with pytest.raises(ZeroDivisionError), auxiliary_weight(9.0):
            1 / 0  # noqa: B018
        add_auxiliary_loss(leaf(1.0), 1 * w.sum()).sum().backward()
    assert w.grad.item() == 0.5


def test_the_weight_reaches_a_backward_pass_in_another_thread():
    w = leaf(1.0)
    x = add_auxiliary_loss(leaf(1.0), 1 * w.sum()).sum()
    with auxiliary_weight(0.125):
        thread = threading.Thread(target=x.backward)
        thread.start()
        thread.join()
    assert w.grad.item() == 0.125


def test_activations_without_gradient_still_carry_the_loss():
    w = leaf(1.0)
    x = add_auxiliary_loss(torch.ones(2, dtype=torch.float64), w.sum() * 3)
    x.sum().backward()
    assert w.grad.item() == 3


def test_a_loss_of_another_type_and_of_shape_one_gets_a_gradient_of_its_own():
    w = torch.ones(1, requires_grad=True)
    x = leaf(1.0, 1.0)
    with auxiliary_weight(0.5):
        add_auxiliary_loss(x, 2 * w).sum().backward()
    assert (w.grad.dtype, w.grad.item()) == (torch.float32, 1.0)
    assert x.grad.dtype == torch.float64


def test_a_loss_that_is_constant_has_no_effect():
    x = leaf(2.0)
    add_auxiliary_loss(x, torch.tensor(5.0)).sum().backward()
    assert x.grad.item() == 1
    with torch.no_grad():
        assert not add_auxiliary_loss(2 * x, x.sum()).requires_grad


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)])
def test_what_is_no_scalar_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError, match=r"must be a scalar, got shape \[" + ", ".join(map(str, shape)) + r"\]"):
        add_auxiliary_loss(leaf(1.0), torch.ones(shape))


def test_the_listener_hears_each_loss_inside_its_context_only():
    heard = []
    add_auxiliary_loss(leaf(1.0), torch.ones(()))
    with auxiliary_listener(lambda: heard.append("outer")):
        add_auxiliary_loss(leaf(1.0), torch.ones(()))
        with auxiliary_listener(lambda: heard.append("inner")):
            add_auxiliary_loss(leaf(1.0), torch.ones(()))
        add_auxiliary_loss(leaf(1.0), torch.ones(()))
    add_auxiliary_loss(leaf(1.0), torch.ones(()))
    assert heard == ["outer", "inner", "outer"]
