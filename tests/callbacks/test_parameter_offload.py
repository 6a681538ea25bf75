"""Fits whose parameters stream from the host have the bits of those without."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from examples.gpt import GPT, Block
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import MemoryLedger, ParameterOffload
from lightning_hybrid.callbacks.parameter_offload import check_strategy
from lightning_hybrid.precision import MasterWeights
from tests.launch import run_trainers
from tests.parity_batches import make_batch
from tests.parity_models import make
from tests.parity_run import Slices
from tests.small import Small, hybrid, loader, trainer_of

DEPTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Dropping(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Bytes(GPT):
    """The example, with dropout; it reads its positions past their module's call."""

    depth = DEPTH

    def __init__(self, **options):
        torch.manual_seed(1)
        super().__init__(width=16, depth=self.depth, heads=4, context=7, learning_rate=1e-2, **options)
        self.blocks = nn.ModuleList(Dropping(16, 4) for _ in range(self.depth))


class Shallow(Bytes):
    depth = 4


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class Images(LightningModule):
    """A small residual network, channels last, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inlet, self.outlet = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)), nn.Linear(8, 5)
        self.blocks = nn.Sequential(*(Residual() for _ in range(4)))
        self.shift = nn.Parameter(torch.rand(5))
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        x = self.blocks(self.inlet(batch["x"])).mean((2, 3))
        return F.cross_entropy(self.outlet(x) + self.shift, batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def translator():
    return make("t5", False)  # tied embeddings, and an encoder's output that all of the decoder reads


class Losses(Callback):
    def __init__(self):
        self.seen, self.steady = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(float(outputs))


def batches(kind, number=3, size=4):
    return [make_batch(kind, False, size, seed) for seed in range(number)]


def fitted(model, kind, offload, strategy="auto", more=(), **options):
    """Losses, and the weights of rank 0; with the callback."""
    losses = Losses()
    torch.manual_seed(2)
    callbacks = [losses, offload, *more] if offload else [losses]
    trainer = trainer_of(strategy, callbacks=callbacks, use_distributed_sampler=False, **options)
    trainer.fit(model, Slices(batches(kind)))
    return losses.seen, dict(trainer.strategy.lightning_module_state_dict())


def assert_equal(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize(
    ("model", "kind"), [(Bytes, "example"), (Images, "vit"), (translator, "t5")], ids=["gpt", "resnet", "t5"]
)
def test_one_process(model, kind):
    offload = ParameterOffload()
    assert_equal(fitted(model(), kind, offload), fitted(model(), kind, None))
    assert offload.streaming is None
    counts = offload.counts
    assert counts.accesses == counts.hits + counts.fetches
    first = counts.waits
    assert 0 < first <= counts.accesses / 3 + 2  # of three batches the first; the others for one unit
    assert counts.prefetched == counts.fetches - first


class Sizes(Callback):
    def on_train_start(self, trainer, pl_module):
        streaming = trainer.callbacks[0].streaming
        self.device, self.buffers = streaming.device_bytes, streaming.buffers.num_bytes
        self.largest = max(unit.num_bytes for unit in streaming.units)
        self.whole = sum(p.numel() * p.element_size() for p in pl_module.parameters())


def test_a_model_of_four_times_the_buffers_trains():
    sizes = Sizes()
    found, expected = Bytes(), Bytes()
    for model, callbacks in ((found, [ParameterOffload(), sizes]), (expected, [])):
        torch.manual_seed(0)
        trainer_of(callbacks=callbacks).fit(model, DataLoader(batches("example", 5), batch_size=None))
    assert sizes.buffers == 2 * sizes.largest
    assert sizes.device == sizes.buffers
    assert sizes.whole > 4 * sizes.device
    assert_equal(([], found.state_dict()), ([], expected.state_dict()))


class ByHand(Bytes):
    """Two optimizers, which step in the middle of a training step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss(batch, "train")
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        blocks = list(self.blocks.parameters())
        others = [p for p in self.parameters() if not any(p is other for other in blocks)]
        return torch.optim.SGD(blocks, 0.1), torch.optim.Adagrad(others, 0.01)


def test_steps_by_hand_under_a_ledger():
    offload, ledger = ParameterOffload(), MemoryLedger()
    found = fitted(ByHand(), "example", offload, more=[ledger])
    assert_equal(found, fitted(ByHand(), "example", None))
    assert ledger.peak.totals()["gradients"] == ledger.peak.totals()["trainable"]


def test_validation_accumulation_clipping_and_going_on(tmp_path):
    def run(offload):
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
        train, val = (DataLoader(batches("example", number), batch_size=None) for number in (4, 2))
        seen = []
        for epochs, path in ((1, None), (2, tmp_path / "last.ckpt")):
            losses, model = Losses(), Bytes()
            callbacks = [losses, ParameterOffload(3)] if offload else [losses]
            torch.manual_seed(epochs)
            trainer = trainer_of(callbacks=callbacks, **options | {"max_epochs": epochs})
            trainer.fit(model, train, val, ckpt_path=path)
            trainer.save_checkpoint(tmp_path / "last.ckpt")
            seen += losses.seen
            torch.manual_seed(3)
            seen += [trainer.validate(model, val, verbose=False)[0]["val/bits_per_byte"]]
        return seen, model.state_dict()

    assert_equal(run(offload=True), run(offload=False))


def on_ranks():
    """On a rank: with and without the callback, under one strategy after the other."""
    results = {}
    strategies = {
        "ddp": lambda: DDPStrategy(),
        "pipeline": lambda: hybrid(2, chunks=2, microbatches=2, zero_stage=1),
        "replicas": lambda: HybridPTDPStrategy(1, zero_stage=0),
        "zero 3": lambda: HybridPTDPStrategy(1, zero_stage=3),
    }
    for name, make_strategy in strategies.items():
        offload, strategy = ParameterOffload(), make_strategy()
        found = fitted(Shallow(tie_weights=name != "ddp"), "example", offload, strategy)
        expected = fitted(Shallow(tie_weights=name != "ddp"), "example", None, make_strategy())
        options = getattr(strategy, "options", {})
        results[name] = found, expected, copy.copy(offload.counts), options.get("cpu_offload", False)
    errors = []
    for stage in (1, 2):
        with pytest.raises(ValueError, match=f"zero_stage={stage} and 2 replicas") as caught:
            trainer_of(HybridPTDPStrategy(1, zero_stage=stage), callbacks=[ParameterOffload()]).fit(
                Small(), loader(8, 2)
            )
        errors.append(str(caught.value))
    return results, errors


def test_on_two_ranks():
    for results, errors in run_trainers(2, on_ranks):
        for name, (found, expected, counts, cpu_offload) in results.items():
            assert_equal(found, expected)
            assert cpu_offload == (name == "zero 3")
            if name != "zero 3":
                assert counts.accesses == counts.hits + counts.fetches > 0
                assert counts.waits < counts.accesses / 2
        assert all("cpu_offload=True" in error for error in errors)


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        (FSDPStrategy(), r"FSDPStrategy.*FSDPStrategy\(cpu_offload=True\)"),
        (ModelParallelStrategy(), r"ModelParallelStrategy.*CPUOffloadPolicy"),
        (hybrid(1, tensor_parallel_size=2), r"tensor_parallel_size=2 splits them. Set zero_stage=3"),
        (hybrid(1, expert_parallel_size=2), r"expert_parallel_size=2 splits them. Set zero_stage=3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused(strategy, error):
    with pytest.raises(ValueError, match=error):
        check_strategy(strategy, getattr(strategy, "options", {}))


def test_two_are_refused():
    callbacks = [ParameterOffload(), ParameterOffload()]
    with pytest.raises(ValueError, match="has 2 ParameterOffloads"):
        callbacks[0].setup(SimpleNamespace(callbacks=callbacks), nn.Linear(1, 1), "fit")


def test_masters_are_refused():
    strategy = HybridPTDPStrategy(1)
    strategy.precision_plugin = MasterWeights()
    with pytest.raises(ValueError, match=r"16-bit copies of float32 masters.*zero_stage=3"):
        check_strategy(strategy, strategy.options)


@pytest.mark.parametrize("number", [1, 2.0, True])
def test_too_few_buffers_are_refused(number):
    with pytest.raises(ValueError, match=f"num_buffers={number} must be a whole number of at least 2"):
        ParameterOffload(number)
