"""Labels that a model draws come with its probabilities, for each loss that is known."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from lightning_hybrid.parallel.curvature.likelihoods import DrawnLabelsMode

NUMBER = 4000
SHARES = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)


def drawn(call, *tensors):
    """Labels that take the place of those of a loss, as the loss with one output at a time tells them."""
    mode = DrawnLabelsMode(torch.Generator().manual_seed(0))
    with mode:
        losses = call(*tensors)
    return losses, mode.number


def near(counts, shares):
    """Within 4.5 standard errors of draws that are independent."""
    return bool(((counts / NUMBER - shares).abs() < 4.5 * (shares * (1 - shares) / NUMBER).sqrt()).all())


def test_classes_come_by_their_probabilities():
    scores = SHARES.log().expand(NUMBER, 3)
    labels = torch.zeros(NUMBER, dtype=torch.int64)
    values = -SHARES.log()
    for call in (
        lambda s, y: F.cross_entropy(s, y, reduction="none"),
        lambda s, y: nn.CrossEntropyLoss(reduction="none")(s, y),
        lambda s, y: F.nll_loss(s, y, reduction="none"),
        lambda s, y: F.cross_entropy(s, F.one_hot(y, 3).double(), reduction="none"),
    ):
        losses, number = drawn(call, scores, labels)
        assert number >= 1
        assert near(torch.stack([torch.isclose(losses, value).sum() for value in values]), SHARES)


def test_entries_that_are_ignored_stay_and_a_row_does_not_depend_on_others():
    scores = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.tensor([[0, 1, -100, 2]] * 5)
    losses, _ = drawn(lambda s, y: F.cross_entropy(s, y, reduction="none"), scores, labels)
    assert losses.shape == (5, 4)
    assert losses[:, 2].tolist() == [0.0] * 5
    changed = scores.clone()
    changed[0] += torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    others, _ = drawn(lambda s, y: F.cross_entropy(s, y, reduction="none"), changed, labels)
    assert torch.equal(losses[1:], others[1:])
    assert not torch.equal(losses[0], others[0])


@pytest.mark.parametrize("with_logits", [True, False])
def test_bits_come_by_their_probabilities(with_logits):
    share = torch.full((NUMBER,), 0.2, dtype=torch.float64)
    zeros = torch.zeros(NUMBER, dtype=torch.float64)
    call = F.binary_cross_entropy_with_logits if with_logits else F.binary_cross_entropy
    losses, _ = drawn(lambda s, y: call(s, y, reduction="none"), share.logit() if with_logits else share, zeros)
    ones = torch.isclose(losses, -share.log()).sum()
    assert near(torch.stack([ones, NUMBER - ones]), torch.tensor([0.2, 0.8]))


def test_numbers_are_normal_around_the_output_whichever_comes_first():
    outputs = torch.zeros(NUMBER, dtype=torch.float64, requires_grad=True)
    labels = torch.full((NUMBER,), 9.0, dtype=torch.float64)
    for pair in ((outputs, labels), (labels, outputs)):
        losses, _ = drawn(lambda a, b: F.mse_loss(a, b, reduction="none"), *pair)
        assert abs(losses.mean().item() - 0.5) < 4.5 * (0.5 / NUMBER) ** 0.5  # variance of x^2 is 2 (1/2)^2
        (slopes,) = torch.autograd.grad(losses.sum(), outputs)
        assert_close(slopes.square(), 4 * losses.detach(), rtol=1e-12, atol=0)


def test_other_functions_are_left_alone():
    x = torch.ones(3)
    found, number = drawn(lambda a: F.l1_loss(a, a + 1), x)
    assert (found.item(), number) == (1.0, 0)
