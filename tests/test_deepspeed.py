"""DeepSpeed on CPUs: the same losses as our stages, nothing clipped or compiled unasked, and our callbacks."""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_hybrid import HybridDeepSpeedStrategy
from lightning_hybrid.callbacks import CommunicationLedger, MemoryLedger
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, trainer_of

NUM_STEPS, CLIP = 10, 0.5
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is missing: pip install deepspeed, after torch"
)
pytestmark = [
    # torch 2.13 has new names for two collectives
    pytest.mark.filterwarnings("ignore:.torch.distributed.(all_gather_into|reduce_scatter)_tensor. is d:FutureWarning"),
    # by torch's compiler, which DeepSpeed imports
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


class Single(Small):
    """In float32, with gradients whose norm is well above 1."""

    rate = 0.002

    def __init__(self):
        super().__init__()
        self.float()

    def loss(self, batch):
        x, y = (part.float() for part in batch)
        return 10 * F.mse_loss(self(x), y)


class Losses(Callback):
    """Losses, and the norms of gradients where these are whole."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean"))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms += [torch.nn.utils.get_total_norm(gradients)] if gradients else []


def losses(strategy, **options):
    seen = Losses()
    fit(Single(), loader(4 * NUM_STEPS, 4, 2), strategy, callbacks=[seen], **options)
    assert len(seen.losses) == NUM_STEPS
    return torch.stack(seen.losses), seen.norms


def compared(folder):
    """On a rank: the losses without sharding, then for each stage and clipping ours and DeepSpeed's."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)  # where anything compiled would be
    plain, norms = losses(hybrid(1, microbatches=1, zero_stage=0))
    pairs = {}
    for clip in (None, CLIP):
        for stage in (1, 2, 3):
            ours, _ = losses(hybrid(1, microbatches=1, zero_stage=stage), gradient_clip_val=clip)
            theirs, _ = losses(HybridDeepSpeedStrategy(stage=stage), gradient_clip_val=clip)
            pairs[stage, clip] = ours, theirs
    return plain, norms, pairs


@needs_deepspeed
def test_losses_of_all_stages_are_ours(tmp_path):
    for plain, norms, pairs in run_trainers(2, compared, tmp_path):
        assert min(norms) > 1  # clipping to a norm of 1, which is DeepSpeed's default, would show
        for (stage, clip), (ours, theirs) in pairs.items():
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6), (stage, clip, ours - theirs)
            assert torch.allclose(ours, plain, rtol=1e-5) == (clip is None)
    assert not list(tmp_path.iterdir()), "something was compiled"


def refused():
    messages = []
    for stage in (1, 3):
        trainer = trainer_of(HybridDeepSpeedStrategy(stage=stage), callbacks=[MemoryLedger()])
        with pytest.raises(ValueError, match="MemoryLedger") as caught:
            trainer.fit(Single(), loader(8, 4, 2))
        messages.append((str(caught.value), trainer.global_step))
    strategy = HybridDeepSpeedStrategy()
    strategy.accelerator = CUDAAccelerator()
    with pytest.raises(ValueError, match=r"accelerator='cpu'.*CUDAAccelerator.*strategy='deepspeed'"):
        strategy.setup_environment()
    return messages


@needs_deepspeed
def test_what_it_cannot_do_is_refused_by_name():
    for messages in run_trainers(2, refused):
        for message, steps in messages:
            assert "CommunicationLedger" in message
            assert steps == 0


def counted():
    """On a rank: for each stage, bytes of float32 numbers that it sends in the third step, by collective."""
    found = {}
    for stage in (1, 2, 3):
        ledger, sent = CommunicationLedger(), {}
        fit(Single(), loader(12, 4, 2), HybridDeepSpeedStrategy(stage=stage), callbacks=[ledger])
        for row, traffic in ledger.last.items():
            if row.dtype == "float32":
                sent[row.collective] = sent.get(row.collective, 0) + traffic.wire
        found[stage] = sent
    return found


@needs_deepspeed
def test_ledger_counts_what_it_sends():
    """Stages 1 and 2 sum whole gradients and gather parameters; stage 3 gathers twice and scatters once."""
    half = sum(p.numel() for p in Single().parameters()) * 4 // 2  # what each of two ranks keeps
    once = {1: {"all_reduce": 2, "all_gather": 1}, 3: {"all_gather": 2, "reduce_scatter": 1}}
    for found in run_trainers(2, counted):
        assert found[1] == found[2]
        for stage, expected in once.items():
            assert set(found[stage]) == set(expected)
            for collective, times in expected.items():
                assert times * half <= found[stage][collective] <= times * half + 16  # what fills up


def test_without_deepspeed_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("lightning_hybrid.strategies.deepspeed.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"hybrid_deepspeed_cpu.*after torch.*pip install deepspeed"):
        HybridDeepSpeedStrategy()
