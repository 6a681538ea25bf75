"""Inputs and slopes of layers give their gradients, and their sums are those of literal loops."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from lightning_hybrid.parallel.curvature.layers import layer_of

IMAGE = (2, 3, 5, 6)
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "of sequences": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "of one": (lambda: nn.Linear(4, 3), (4,)),
    "transposed": (lambda: Conv1D(3, 4), (2, 5, 4)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), IMAGE),
    "stride": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), bias=False), IMAGE),
    "same": (lambda: nn.Conv2d(3, 4, (2, 3), padding="same", dilation=(3, 1)), IMAGE),
    "valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), IMAGE),
    "reflect": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), IMAGE),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular", stride=2), IMAGE),
    "replicate": (lambda: nn.Conv2d(3, 4, 3, padding="same", padding_mode="replicate"), IMAGE),
    "one image": (lambda: nn.Conv2d(3, 4, 3, padding=1), IMAGE[1:]),
    "embedding": (lambda: nn.Embedding(7, 3), None),
    "padding": (lambda: nn.Embedding(7, 3, padding_idx=2), None),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_rows_and_slopes_make_the_gradient_and_the_sums(name):
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    module = make().double()
    inputs = torch.randint(7, (2, 5)) if shape is None else torch.randn(shape, dtype=torch.float64)
    output = module(inputs)
    direction = torch.randn_like(output)
    (output * direction).sum().backward()
    layer = layer_of(module)
    kept, slopes = layer.inputs((inputs,), {}), layer.slopes(direction)
    if shape is None:
        rows = nn.functional.one_hot(kept, 7).double()
        if module.padding_idx is not None:
            rows[:, module.padding_idx] = 0
            assert layer.counted(kept).flatten().tolist() == (kept != module.padding_idx).tolist()
    else:
        ones = torch.ones(len(kept), 1, dtype=torch.float64)
        rows = torch.cat([kept, ones], 1) if module.bias is not None else kept
    found = layer.matrix(module.weight.grad, None if getattr(module, "bias", None) is None else module.bias.grad)
    assert found.shape == (layer.rows, layer.columns)
    assert_close(found, slopes.T @ rows, rtol=1e-12, atol=1e-12)
    weight, bias = layer.split(found)
    assert torch.equal(weight, module.weight.grad)
    assert (bias is None) == (getattr(module, "bias", None) is None)
    assert bias is None or torch.equal(bias, module.bias.grad)
    moment, number = layer.moment(kept, torch.float64)
    expected = sum(torch.outer(row, row) for row in rows)
    assert_close(moment, expected.diagonal() if layer.is_diagonal else expected, rtol=1e-12, atol=1e-12)
    assert number == (rows.sum() if layer.is_diagonal else len(rows))


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Own(2, 2), "Own has a forward of its own"),
        (nn.Conv2d(4, 4, 1, groups=2), "it has groups"),
        (nn.Embedding(3, 2, max_norm=1.0), "it has max_norm"),
        (nn.Embedding(3, 2, sparse=True), "it has sparse"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "it has scale_grad_by_freq"),
        (nn.LayerNorm(2), None),
        (nn.Conv1d(2, 2, 1), None),
        (nn.ConvTranspose2d(2, 2, 1), None),
    ],
)
def test_other_modules_are_none_or_say_why(module, reason):
    found = layer_of(module)
    assert found is None if reason is None else found.startswith(reason)
