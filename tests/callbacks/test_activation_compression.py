import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import ActivationCompression, ActivationOffload, ExpertMonitor, MemoryLedger
from tests.small import trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but")
BATCH, SIZE = 4, 8


class Net(LightningModule):
    """Of each pair of Gist one, and a skip connection."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.relu, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Linear(8 * 4 * 4, 3)

    def forward(self, x):
        x = F.max_pool2d(self.relu(self.first(x)), 2)
        x = self.relu(self.second(x))
        return self.head((self.third(x) + x).flatten(1))

    def training_step(self, batch, batch_idx):
        images, classes = batch
        return F.cross_entropy(self(images), classes)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(steps=3):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(steps, BATCH, 3, SIZE, SIZE, generator=generator)
    return DataLoader([(one.clone(), torch.arange(BATCH) % 3) for one in images], batch_size=None)


def fit(*callbacks, module=None, **options):
    module = module or Net()
    trainer_of("auto", callbacks=list(callbacks), **options).fit(module, loader(), loader(1))
    return module


def test_a_fit_is_bitwise_that_without_and_the_ledger_shows_what_became_of_what(capsys, tmp_path):
    plain, ledger, picture = MemoryLedger(), MemoryLedger(), tmp_path / "made" / "a.png"
    compression = ActivationCompression(min_bytes=0, picture=str(picture))
    expected, found = fit(plain), fit(compression, ledger)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))
    relu, pool = BATCH * 8 * SIZE * SIZE * 4, BATCH * 8 * 16 * 8
    layers = compression.layers
    assert layers["relu"].before == relu + relu // 4
    assert layers["relu"].after["bits"] == relu // 32
    assert layers[""].after["argmax"] == pool // 16
    before, after = (sum(getattr(layer, name) for layer in layers.values()) for name in ("before", "total_after"))
    assert before == plain.last.totals()["activations"]
    assert after < ledger.last.totals()["activations"] < before  # the most is while the widest layer is in use
    assert ledger.last.compressed["relu"] >= relu
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "Saved activations of this rank's last batch" in printed
    assert re.search(rf"all .*{before:,} .*{after:,}", printed)


@pytest.mark.parametrize("order", [1, -1])
def test_compression_goes_first_and_leaves_the_rest_to_offloading(order):
    ledger, compression = MemoryLedger(), ActivationCompression(min_bytes=0)
    found = fit(*[compression, ActivationOffload(min_bytes=0), ledger][::order])
    assert all(torch.equal(a, b) for a, b in zip(fit().parameters(), found.parameters(), strict=True))
    assert compression.layers["relu"].after["bits"]
    assert ledger.last.compressed["relu"] >= BATCH * 8 * SIZE * SIZE * 4
    assert ledger.last.offloaded["first"] == BATCH * 3 * SIZE * SIZE * 4


def test_a_lossy_fit_has_the_losses_of_one_step_and_other_gradients():
    losses = []

    class Losses(Net):
        def training_step(self, batch, batch_idx):
            losses.append(super().training_step(batch, batch_idx))
            return losses[-1]

    plain = fit(module=Losses(), limit_train_batches=1)
    lossy = fit(ActivationCompression(lossy="fp8", min_bytes=0), module=Losses(), limit_train_batches=1)
    assert losses[0].item() == losses[1].item()
    assert torch.equal(plain.first.weight, lossy.first.weight)  # its input is the batch, which the loop holds whole
    assert not torch.equal(plain.third.weight, lossy.third.weight)
    assert torch.equal(plain.third.bias, lossy.third.bias)  # which no saved number is read for


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"lossy": "fp9"}, "lossy='fp9' is none of ['fp16', 'fp10', 'fp8']"),
        ({"lossless": False}, "leave nothing to do"),
        ({"lossless": "no"}, "lossless='no' must be True or False"),
        ({"min_bytes": "1k"}, "min_bytes='1k' must be a whole number of bytes"),
        ({"min_bytes": -1}, "min_bytes=-1"),
    ],
)
def test_arguments_are_checked(keywords, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ActivationCompression(**keywords)


@pytest.mark.parametrize("callback", [ActivationCompression, ExpertMonitor, MemoryLedger])
def test_a_picture_that_is_no_path_is_refused(callback):
    with pytest.raises(ValueError, match="picture=None must be True, False, or a path"):
        callback(picture=None)


def test_two_are_refused():
    with pytest.raises(ValueError, match="2 ActivationCompressions"):
        fit(ActivationCompression(), ActivationCompression(lossy="fp8"))


def test_a_model_without_anything_to_compress_is_told():
    class Plain(Net):
        def forward(self, x):
            return self.head(torch.tanh(self.first(x))[:, :, :4, :4].flatten(1))

    with pytest.warns(UserWarning, match=r"ActivationCompression compresses nothing: of [\d,]+ bytes"):
        fit(ActivationCompression(min_bytes=0), module=Plain())


def test_a_fit_after_an_error_starts_anew(tmp_path):
    class Fails(Net):
        fails = True

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.fails and batch_idx:
                raise RuntimeError("in the middle of a step")
            return loss

    compression, module = ActivationCompression(min_bytes=0, picture=str(tmp_path)), Fails()
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(compression, module=module)
    assert (tmp_path / "compression.png").exists()  # of the batch before
    Fails.fails, module = False, Fails()
    found = fit(compression, module=module)
    assert all(torch.equal(a, b) for a, b in zip(fit().parameters(), found.parameters(), strict=True))
