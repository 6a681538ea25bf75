"""Convolutional networks as published, but narrow and for small images, and pictures that they learn to tell apart.

Plain Lightning: each is a list of blocks, which a pipeline may cut between.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 10


class Network(LightningModule):
    """Blocks one after the other, which give a score to each class.

    Args:
        blocks: Lists of layers.
        shrink: What the published widths are divided by; wide ones learn more slowly.
        size: Height and width of an image.
    """

    def __init__(self, blocks: Sequence[Sequence[nn.Module]], shrink: int, size: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(*layers) for layers in blocks))
        self.learning_rate, self.size = shrink / 8000, size
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Give the scores, ``[batch, 10]``, of ``images``, ``[batch, 3, size, size]``."""
        return self.blocks(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def convolution(inputs: int, outputs: int, kernel: int, *pool: nn.Module, **options: int) -> list[nn.Module]:
    """List a convolution, its ReLU in place, and what comes behind it."""
    return [nn.Conv2d(inputs, outputs, kernel, **options), nn.ReLU(inplace=True), *pool]


def with_classifier(features: list[list[nn.Module]], size: int, *widths: int) -> list[list[nn.Module]]:
    """Add fully connected layers with dropout, for images of a size."""
    with torch.no_grad():
        shape = nn.Sequential(*(layer for block in features for layer in block))(torch.zeros(1, 3, size, size))
    inputs = (shape.numel(), *widths)
    hidden = [[nn.Dropout(), nn.Linear(a, b), nn.ReLU(inplace=True)] for a, b in pairwise(inputs)]
    hidden[0] = [nn.Flatten(), *hidden[0]]
    return [*features, *hidden, [nn.Linear(inputs[-1], NUM_CLASSES)]]


def stride_for(size: int) -> int:
    """Take steps half as wide as published over small images, so that maps shrink alike."""
    return 4 if size > 128 else 2


class AlexNet(Network):
    """Krizhevsky et al. 2012: overlapping pools, response normalisation before them, convolutions in two groups.

    Args:
        shrink: The published widths are divided by this.
        size: Height and width of an image.
    """

    def __init__(self, shrink: int = 8, size: int = 64) -> None:
        a, b, c, full = (width // shrink for width in (96, 256, 384, 4096))
        features = [
            convolution(
                3, a, 11, nn.LocalResponseNorm(5, k=2.0), nn.MaxPool2d(3, 2), stride=stride_for(size), padding=2
            ),
            convolution(a, b, 5, nn.LocalResponseNorm(5, k=2.0), nn.MaxPool2d(3, 2), padding=2, groups=2),
            convolution(b, c, 3, padding=1),
            convolution(c, c, 3, padding=1, groups=2),
            convolution(c, b, 3, nn.MaxPool2d(3, 2), padding=1, groups=2),
        ]
        super().__init__(with_classifier(features, size, full, full), shrink, size)


class NiN(Network):
    """Lin et al. 2014, "Network in network", for large images: each convolution has two of 1 x 1 behind it.

    Args:
        shrink: As for `AlexNet`.
        size: As for `AlexNet`.
    """

    def __init__(self, shrink: int = 8, size: int = 64) -> None:
        a, b, c, d = (width // shrink for width in (96, 256, 384, 1024))

        def block(
            inputs: int, outputs: int, kernel: int, last: int, *pool: nn.Module, **options: int
        ) -> list[nn.Module]:
            layers = [nn.Conv2d(inputs, outputs, kernel, **options), nn.ReLU()]
            return [*layers, nn.Conv2d(outputs, outputs, 1), nn.ReLU(), nn.Conv2d(outputs, last, 1), nn.ReLU(), *pool]

        blocks = [
            block(3, a, 11, a, nn.MaxPool2d(3, 2, ceil_mode=True), stride=stride_for(size)),
            block(a, b, 5, b, nn.MaxPool2d(3, 2, ceil_mode=True), padding=2),
            block(b, c, 3, c, nn.MaxPool2d(3, 2, ceil_mode=True), nn.Dropout(), padding=1),
            block(c, d, 3, NUM_CLASSES, nn.AdaptiveAvgPool2d(1), nn.Flatten(), padding=1),
        ]
        super().__init__(blocks, shrink, size)


class OverFeat(Network):
    """Sermanet et al. 2014, the fast model: pools that do not overlap, no normalisation.

    Args:
        shrink: As for `AlexNet`.
        size: As for `AlexNet`.
    """

    def __init__(self, shrink: int = 8, size: int = 64) -> None:
        a, b, c, d, e, f = (width // shrink for width in (96, 256, 512, 1024, 3072, 4096))
        features = [
            convolution(3, a, 11, nn.MaxPool2d(2), stride=stride_for(size)),
            convolution(a, b, 5, nn.MaxPool2d(2)),
            convolution(b, c, 3, padding=1),
            convolution(c, d, 3, padding=1),
            convolution(d, d, 3, nn.MaxPool2d(2), padding=1),
        ]
        super().__init__(with_classifier(features, size, e, f), shrink, size)


class VGG16(Network):
    """Simonyan and Zisserman 2015, configuration D.

    Args:
        shrink: As for `AlexNet`.
        size: As for `AlexNet`.
    """

    def __init__(self, shrink: int = 8, size: int = 32) -> None:
        features, inputs = list[list[nn.Module]](), 3
        for published, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                features.append(convolution(inputs, published // shrink, 3, padding=1))
                inputs = published // shrink
            features[-1].append(nn.MaxPool2d(2))
        super().__init__(with_classifier(features, size, 4096 // shrink, 4096 // shrink), shrink, size)


class Mixed(nn.Module):
    """Four branches side by side: 1 x 1, 3 x 3 and 5 x 5 behind 1 x 1, and 1 x 1 behind a pool.

    Args:
        inputs: Channels that come in.
        one: Channels of the first branch.
        three: Of the second, between and behind its two convolutions.
        five: Of the third, likewise.
        pool: Of the fourth.
    """

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.one, self.pool = nn.Conv2d(inputs, one, 1), nn.Conv2d(inputs, pool, 1)
        self.reduce3, self.three = nn.Conv2d(inputs, three[0], 1), nn.Conv2d(*three, 3, padding=1)
        self.reduce5, self.five = nn.Conv2d(inputs, five[0], 1), nn.Conv2d(*five, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        three, five = self.three(F.relu(self.reduce3(x))), self.five(F.relu(self.reduce5(x)))
        branches = (self.one(x), three, five, self.pool(F.max_pool2d(x, 3, 1, 1)))
        return torch.cat([F.relu(branch) for branch in branches], 1)


MIXED = [  # table 1, 3a to 5b: 1 x 1, before 3 x 3, 3 x 3, before 5 x 5, 5 x 5, behind the pool
    [(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)],
    [
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ],
    [(256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)],
]


class Inception(Network):
    """Szegedy et al. 2015, GoogLeNet, without its two auxiliary classifiers.

    Args:
        shrink: As for `AlexNet`.
        size: As for `AlexNet`.
    """

    def __init__(self, shrink: int = 8, size: int = 64) -> None:
        pool, norm = partial(nn.MaxPool2d, 3, 2, ceil_mode=True), partial(nn.LocalResponseNorm, 5)
        a, inputs = 64 // shrink, 192 // shrink
        blocks: list[list[nn.Module]] = [
            convolution(3, a, 7, pool(), norm(), stride=2, padding=3),
            [*convolution(a, a, 1), *convolution(a, inputs, 3, norm(), pool(), padding=1)],
        ]
        for stage in MIXED:
            for published in stage:
                one, before3, three, before5, five, last = (width // shrink for width in published)
                blocks.append([Mixed(inputs, one, (before3, three), (before5, five), last)])
                inputs = one + three + five + last
            blocks[-1].append(nn.AdaptiveAvgPool2d(1) if stage is MIXED[-1] else pool())
        super().__init__([*blocks, [nn.Flatten(), nn.Dropout(0.4), nn.Linear(inputs, NUM_CLASSES)]], shrink, size)


class Residual(nn.Module):
    """Two convolutions with batch norms, and a skip around them.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out; where they are more, maps shrink to half.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.skip = nn.ReLU(inplace=True), nn.Sequential()
        if stride == 2:
            self.skip.extend([nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        y += self.skip(x)
        return self.relu(y)


class ResNet(Network):
    """He et al. 2016, of 18 layers.

    Args:
        shrink: As for `AlexNet`.
        size: As for `AlexNet`.
    """

    def __init__(self, shrink: int = 8, size: int = 64) -> None:
        a, b, c, d = (width // shrink for width in (64, 128, 256, 512))
        stem = [nn.Conv2d(3, a, 7, 2, 3, bias=False), nn.BatchNorm2d(a), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        pairs = ((a, a), (a, a), (a, b), (b, b), (b, c), (c, c), (c, d), (d, d))
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d, NUM_CLASSES)]
        super().__init__([stem, *([Residual(*pair)] for pair in pairs), head], shrink, size)


NETWORKS: dict[str, type[Network]] = {
    network.__name__: network for network in (AlexNet, NiN, OverFeat, VGG16, Inception, ResNet)
}


def pictures(number: int, size: int = 64, seed: int = 0) -> TensorDataset:
    """Draw pictures of a class: its own smooth pattern, in some contrast, behind noise.

    Args:
        number: How many.
        size: Height and width.
        seed: Of the pictures; patterns are the same for all.

    Returns:
        Images, ``[number, 3, size, size]``, and their classes, ``[number]``.
    """
    patterns = torch.randn(NUM_CLASSES, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(NUM_CLASSES, (number,), generator=generator)
    contrast = 0.5 + torch.rand(number, 1, 1, 1, generator=generator)
    images = contrast * F.interpolate(patterns, size=(size, size), mode="bicubic")[classes]
    return TensorDataset(images + 0.5 * torch.randn(images.shape, generator=generator), classes)
