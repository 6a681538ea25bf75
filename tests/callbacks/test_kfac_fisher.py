"""Factors and natural gradients of the callback against explicit Fisher matrices, with exact expectations."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import KFACPreconditioner
from tests.small import Small, trainer_of

DAMPING, NUMBER = 0.05, 7  # samples, without their labels


class Net(Small):
    """A squared loss, whose -log likelihood is that of a normal distribution of variance 1/2."""

    bias = True

    def __init__(self):
        super(Small, self).__init__()
        torch.manual_seed(5)
        self.layers = self.made().double()

    def made(self):
        return nn.Sequential(nn.Linear(4, 3, bias=self.bias), nn.Linear(3, 2, bias=self.bias))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y, reduction="sum") / len(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)  # weights stay


class WithoutBias(Net):
    bias = False


class Images(Net):
    """A kernel as large as the image: without nonlinearity, a block of the Fisher matrix is a Kronecker product."""

    def made(self):
        convolution = nn.Conv2d(2, 3, 3, bias=self.bias)
        return nn.Sequential(convolution, nn.Flatten(), nn.Linear(3, 2, bias=self.bias))


class ImagesWithoutBias(Images):
    bias = False


def inputs(module, number=NUMBER):
    generator = torch.Generator().manual_seed(1)
    shape = (2, 3, 3) if isinstance(module, Images) else (4,)
    return torch.randn(number, *shape, generator=generator, dtype=torch.float64)


def with_exact_labels(module):
    """Each input with labels at the outputs and plus or minus one along each axis: E[noise noise^T] = I / 2."""
    x = inputs(module)
    outputs = module(x).detach()
    axes = torch.eye(2, dtype=torch.float64)
    labels = [outputs + sign * axis for axis in axes for sign in (1, -1)]
    return torch.cat([x] * 4), torch.cat(labels)


def fitted(module, batches, **options):
    callback = KFACPreconditioner(DAMPING, kl_clip=None, inverse_every=1, **options)
    trainer_of(callbacks=[callback]).fit(module, DataLoader(batches, batch_size=None))
    return callback


def explicit(module, name, x):
    """E[J^T (2 I) J] of a layer's parameters, the bias as a last column of the weight, columns below one another."""
    layer = module.get_submodule(name)
    own = {key: p.detach() for key, p in layer.named_parameters()}
    other = {key: p.detach() for key, p in module.named_parameters()}

    def output(values, sample):
        return functional_call(module, {**other, **{f"{name}.{key}": v for key, v in values.items()}}, sample[None])[0]

    found = vmap(jacrev(output), (None, 0))(own, x)
    parts = [found["weight"].flatten(3)]
    parts += [found["bias"][..., None]] if "bias" in found else []
    jacobian = torch.cat(parts, 3).transpose(2, 3).flatten(2)
    return 2 * torch.einsum("noi,noj->ij", jacobian, jacobian) / len(x)


MODULES = [Net, WithoutBias, Images, ImagesWithoutBias]


@pytest.mark.parametrize("make", MODULES)
def test_factors_and_natural_gradients_are_those_of_the_fisher_matrix(make):
    module = make()
    x, y = with_exact_labels(module)
    callback = fitted(module, [(x, y)], method="eigen")
    assert len(callback._factors.of) == 2
    for name, factors in callback._factors.of.items():
        fisher = explicit(module, name, x[:NUMBER])
        assert_close(torch.kron(factors.first, factors.second), fisher, rtol=1e-9, atol=1e-12)
        gradient = torch.randn(len(factors.second), len(factors.first), dtype=torch.float64)
        damped = fisher + DAMPING * torch.eye(len(fisher), dtype=torch.float64)
        expected = torch.linalg.solve(damped, gradient.T.flatten())
        assert_close(callback._factors.natural(name, gradient).T.flatten(), expected, rtol=1e-9, atol=1e-12)


class Convolutions(Net):
    """Two layers of several positions, and a loss over all of them."""

    def made(self):
        return nn.Sequential(nn.Conv2d(2, 3, 2, padding=1, bias=self.bias), nn.Tanh(), nn.Conv2d(3, 2, 2, stride=2))


class ConvolutionsWithoutBias(Convolutions):
    bias = False


@pytest.mark.parametrize("make", [Convolutions, ConvolutionsWithoutBias])
def test_convolutions_have_the_factors_of_literal_loops_over_positions(make):
    """Grosse and Martens 2016: A is the mean over patches, G the sum over positions, in the mean over samples."""
    module, generator = make(), torch.Generator().manual_seed(1)
    x = torch.randn(3, 2, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(3, 2, 2, 2, generator=generator, dtype=torch.float64)
    callback = fitted(module, [(x, y)])
    first, second = module.layers[0], module.layers[2]
    hidden = first(x).detach().requires_grad_()
    outputs = second(hidden.tanh()).detach().requires_grad_()
    slopes = {"layers.2": 2 * (outputs - y).detach()}
    (slopes["layers.0"],) = torch.autograd.grad((second(hidden.tanh()) - y).square().sum(), hidden)
    padded = {"layers.0": F.pad(x, [1] * 4), "layers.2": hidden.detach().tanh()}
    for name, stride, layer in (("layers.0", 1, first), ("layers.2", 2, second)):
        a, g, patches = 0.0, 0.0, 0
        for n in range(3):
            for i in range(slopes[name].shape[2]):
                for j in range(slopes[name].shape[3]):
                    patch = padded[name][n, :, i * stride : i * stride + 2, j * stride : j * stride + 2].flatten()
                    row = torch.cat([patch, torch.ones(1, dtype=torch.float64)]) if layer.bias is not None else patch
                    a, patches = a + torch.outer(row, row), patches + 1
                    g = g + torch.outer(slopes[name][n, :, i, j], slopes[name][n, :, i, j]) / 3
        factors = callback._factors.of[name]
        assert_close(factors.first, a / patches, rtol=1e-9, atol=1e-12)
        assert_close(factors.second, g, rtol=1e-9, atol=1e-12)


class Classes(Net):
    """The likelihood of classes."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)


def moments(module, x):
    """E[g g^T] of both layers' slopes over all labels and inputs, and the variance of each entry."""
    hidden = module.layers[0](x).detach()
    weight = module.layers[1].weight.detach()
    outputs = module.layers[1](hidden).detach()
    if isinstance(module, Classes):
        shares = outputs.softmax(1)
        slopes = [shares - F.one_hot(torch.tensor(label), 2) for label in range(2)]
        products = {"layers.1": [torch.einsum("ni,nj->nij", g, g) for g in slopes]}
        products["layers.0"] = [torch.einsum("ni,nj->nij", g @ weight, g @ weight) for g in slopes]
        means, variances = {}, {}
        for name, each in products.items():
            per_input = sum(p[:, None, None] * value for p, value in zip(shares.T, each, strict=True))
            squares = sum(p[:, None, None] * value**2 for p, value in zip(shares.T, each, strict=True))
            means[name], variances[name] = per_input.mean(0), (squares - per_input**2).mean(0)
        return means, variances
    means = {"layers.1": 2 * torch.eye(2, dtype=torch.float64)}
    means["layers.0"] = weight.T @ means["layers.1"] @ weight
    variances = {name: torch.outer(m.diagonal(), m.diagonal()) + m**2 for name, m in means.items()}
    return means, variances


@pytest.mark.parametrize("make", [Net, Classes])
def test_drawn_labels_converge_to_the_exact_moments(make):
    """With the root of their number: within 4.5 standard errors of few steps, and of many."""
    module = make()
    x = inputs(module, 16)
    means, variances = moments(module, x)
    labels = torch.zeros(16, dtype=torch.int64) if make is Classes else torch.zeros(16, 2, dtype=torch.float64)
    for steps in (4, 400):
        callback = fitted(module, [(x, labels)] * steps, fisher="mc", factor_every=1, factor_decay=0.9999, seed=steps)
        for name, mean in means.items():
            standard = (variances[name] / (16 * steps)).sqrt()
            found = callback._factors.of[name].second
            assert bool(((found - mean).abs() <= 4.5 * standard + 1e-12).all()), (name, steps)
            assert not torch.allclose(found, mean, rtol=1e-6, atol=0)
