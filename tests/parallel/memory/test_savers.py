import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.functional.pool_codecs import Window
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, keep
from lightning_hybrid.parallel.memory.inputs import Arguments
from lightning_hybrid.parallel.memory.savers import saver_of

IMAGES = torch.randn(2, 3, 8, 8)
CLASSES = torch.tensor([0, 1])


def kinds_of(run, *inputs):
    """What is said of each tensor that a call saves."""
    found = []

    def pack(tensor):
        found.append(saver_of(tensor))
        return keep(tensor)

    with ChainedHooks(pack):
        run(*(tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs))
    return found


@pytest.mark.parametrize("run", [nn.ReLU(), F.relu, lambda x: nn.ReLU(inplace=True)(x * 2), nn.Sequential(nn.ReLU())])
def test_a_relu_reads_where_its_result_is_positive(run):
    assert kinds_of(run, IMAGES)[-1].kind == "relu"


@pytest.mark.parametrize(
    ("run", "window"),
    [
        (nn.MaxPool2d(2), Window((2, 2), (2, 2), (0, 0), (1, 1), 8)),
        (nn.MaxPool2d(3, 2, 1, ceil_mode=True), Window((3, 3), (2, 2), (1, 1), (1, 1), 8)),
        (nn.MaxPool2d((3, 2), (1, 2), (1, 0), (2, 1)), Window((3, 2), (1, 2), (1, 0), (2, 1), 8)),
        (lambda x: F.max_pool2d(x, 2, ()), Window((2, 2), (2, 2), (0, 0), (1, 1), 8)),
        (lambda x: F.max_pool2d(x, [3, 2], return_indices=True), Window((3, 2), (3, 2), (0, 0), (1, 1), 8)),
    ],
)
def test_a_max_pool_reads_a_shape_and_places(run, window):
    whole, places = kinds_of(run, IMAGES)
    assert (whole.kind, places.kind, places.window) == ("pool", "argmax", window)


def test_a_device_that_is_not_known_may_read_what_a_pool_had():
    kinds = [saver.kind for saver in kinds_of(Inner(nn.MaxPool2d(2)), IMAGES.detach().to("meta"))]
    assert kinds == ["other", "argmax"]


class Inner(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *inputs):
        return self.run(*inputs)


class Smooth(nn.CrossEntropyLoss):
    def forward(self, inputs, classes):
        return -(inputs.exp() * inputs.sin()).sum()


def test_other_operations_read_numbers_and_belong_to_the_innermost_module():
    convolution = nn.Conv2d(3, 4, 3)
    found = kinds_of(Inner(lambda x: convolution(x)), IMAGES)
    assert {(saver.kind, saver.module) for saver in found} == {("other", convolution)}
    for run in (torch.tanh, torch.relu, lambda x: x.clone().relu_(), lambda x: F.adaptive_max_pool2d(x, 2)):
        assert {saver.kind for saver in kinds_of(Inner(run), IMAGES)} == {"other"}


@pytest.mark.parametrize(
    "run",
    [
        nn.CrossEntropyLoss(),
        Smooth(),
        Inner(F.cross_entropy),
        Inner(lambda x, y: F.mse_loss(x, torch.ones(2, 3))),
        Inner(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y)),
        lambda x, y: x * x,
        Inner(lambda x, y: checkpoint(torch.tanh, x, use_reentrant=False)),
        Inner(lambda x, y: checkpoint(torch.tanh, x, use_reentrant=True)),
        Inner(lambda x, y: Arguments((x,), {}, lambda tensor: None, lambda tensors: torch.enable_grad())),
    ],
)
def test_losses_and_what_a_forward_is_repeated_from_are_exact(run):
    found = kinds_of(run, torch.randn(2, 3), CLASSES)
    assert found
    assert {saver.kind for saver in found} == {"exact"}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm(8), nn.InstanceNorm2d(3)])
def test_statistics_of_norms_are_exact_and_what_they_normalise_is_not(norm):
    kinds = [saver.kind for saver in kinds_of(Inner(lambda x: norm(x)), IMAGES.clone())]
    assert kinds.count("other") == 1
    assert kinds.count("exact") >= 2


def test_a_subclass_that_replaces_relu_does_not_save_for_it():
    class Doubled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is F.relu:
                plain = args[0].as_subclass(torch.Tensor)
                return plain.exp() * 2
            return super().__torch_function__(func, types, args, kwargs)

    assert {s.kind for s in kinds_of(Inner(lambda x: F.relu(x.as_subclass(Doubled))), IMAGES)} == {"other"}
