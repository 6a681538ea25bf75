"""What lossy compression changes: gradients of weights within a bound; no forward pass, and accuracy hardly."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import ActivationCompression
from lightning_hybrid.functional.codecs import ERROR_BOUNDS
from tests.launch import run_trainers
from tests.memory_models import NETWORKS
from tests.small import trainer_of

each_format = pytest.mark.parametrize("lossy", ERROR_BOUNDS)


class OneLayer(LightningModule):
    """A layer whose input nobody else holds, and a loss whose gradient is the batch's second part, in float64."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.double()

    def training_step(self, batch, batch_idx):
        x, gradient = batch
        return (self.layer(x * 2) * gradient).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def gradient_of(layer, batch, *callbacks):
    module = OneLayer(layer)
    trainer_of(callbacks=[*callbacks], max_steps=1).fit(module, DataLoader([batch], batch_size=None))
    return module.layer.weight.grad.clone()


@each_format
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(20, 6), (30, 20)),
        (lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1), (4, 3, 9, 9)),
    ],
)
def test_gradients_of_weights_are_within_the_bound_of_each_number(lossy, layer, shape):
    torch.manual_seed(0)
    layer, x = layer().double(), torch.randn(shape, dtype=torch.float64)
    gradient = torch.randn_like(layer(x))
    exact = gradient_of(layer, (x, gradient))
    layer.zero_grad()
    found = gradient_of(layer, (x, gradient), ActivationCompression(lossy=lossy, min_bytes=0))
    layer.zero_grad()
    bound = gradient_of(layer, (ERROR_BOUNDS[lossy].of(x * 2) / 2, gradient.abs()))
    error = (found - exact).abs()
    assert error.max() > 0
    assert (error <= bound * (1 + 1e-9)).all()  # sums in float64


class Watched(LightningModule):
    """A network of the examples that keeps a step's scores, loss and images."""

    def __init__(self, network):
        super().__init__()
        torch.manual_seed(1)
        self.network = NETWORKS[network]()

    def training_step(self, batch, batch_idx):
        images, classes = batch
        self.images = images.clone().requires_grad_()
        self.scores = self.network(self.images)
        self.loss = F.cross_entropy(self.scores, classes)
        return self.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def step_of(network, *callbacks):
    """One step's forward pass and gradient of the images, gradients of vectors, and those of matrices."""
    module = Watched(network)
    data = DataLoader(module.network.batches()[:1], batch_size=None)
    torch.manual_seed(2)
    trainer_of(callbacks=[*callbacks]).fit(module, data)
    vectors, matrices = ([p.grad for p in module.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (0, 1))
    return [module.scores, module.loss, module.images.grad, *vectors], matrices


@each_format
@pytest.mark.parametrize("network", ["NiN", "VGG16"])
def test_a_forward_pass_and_gradients_of_inputs_and_biases_are_exact(network, lossy):
    exact, weights = step_of(network)
    found, others = step_of(network, ActivationCompression(lossy=lossy))
    assert all(torch.equal(a, b) for a, b in zip(exact, found, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights[1:-3], others[1:-3], strict=True))


class Digits(LightningModule):
    """Handwritten digits of 8 x 8, by convolutions."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch, batch_idx):
        images, classes = batch
        return F.cross_entropy(self.layers(images), classes)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        rate = OneCycleLR(optimizer, 0.03, total_steps=self.trainer.estimated_stepping_batches + 1)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


def accuracy(seed, digits, *callbacks):
    """Of a net that was trained on four fifths of the digits, on the rest."""
    images, classes = digits
    module, number = Digits(seed), len(images) * 4 // 5
    train, test = torch.randperm(len(images)).tensor_split([number])
    batches = [(images[rows], classes[rows]) for rows in train.split(128)]
    trainer_of(callbacks=[*callbacks], max_epochs=8).fit(module, DataLoader(batches, batch_size=None))
    return (module.layers(images[test]).argmax(1) == classes[test]).double().mean().item()


def accuracies():
    """By format, None for none, of three seeds each. What is lossless changes nothing, and takes time."""
    found = load_digits()
    digits = torch.tensor(found.images[:, None] / 16, dtype=torch.float32), torch.tensor(found.target)
    formats = {None: [], **{lossy: [ActivationCompression(False, lossy)] for lossy in ERROR_BOUNDS}}
    return {lossy: [accuracy(seed, digits, *callbacks) for seed in range(3)] for lossy, callbacks in formats.items()}


def test_a_small_net_becomes_as_accurate():
    plain, *others = (sum(of_seeds) / 3 for of_seeds in run_trainers(1, accuracies, timeout=600)[0].values())
    assert plain > 0.95
    assert all(abs(other - plain) <= 0.01 for other in others)
