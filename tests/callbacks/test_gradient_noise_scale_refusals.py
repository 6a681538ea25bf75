"""What cannot be measured is refused by name, before a step is taken."""

import math

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.callbacks import GradientNoiseScaleMonitor
from lightning_hybrid.metrics import GradientNoiseScale
from tests.callbacks.test_gradient_noise_scale_monitor import Net, monitor, run
from tests.launch import run_trainers
from tests.small import fit, hybrid, loader, trainer_of
from tests.test_expert_parity import Mixtures


def test_other_metrics_are_refused():
    with pytest.raises(TypeError, match="is no GradientNoiseScale"):
        GradientNoiseScaleMonitor(0.99)


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan, True, "0.9"])
def test_decays_out_of_range_are_refused(decay):
    with pytest.raises(ValueError, match="must be a number from 0 to 1"):
        GradientNoiseScale(decay)


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Reentrant(Net):
    def loss(self, batch):
        x, y = batch
        x.requires_grad_(True)
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return (x.sum(1, keepdim=True) - y).square().mean()


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (Net, {}, ValueError, "accumulate_grad_batches=1: each step has one gradient"),
        (ByHand, {}, ValueError, "automatic_optimization=False"),
        (Reentrant, {"accumulate_grad_batches": 2}, RuntimeError, "gradient in several parts.*use_reentrant=False"),
    ],
)
def test_trainings_that_show_no_small_gradients_are_refused(module, options, error, message):
    with pytest.raises(error, match=message):
        run(module(), loader(8, 4), **options)


def test_windows_that_become_one_batch_are_not_refused_in_the_middle_of_training(tmp_path):
    windows = {"callbacks": [monitor(), GradientAccumulationScheduler({0: 2, 1: 1})], "max_epochs": 2}
    trainer = fit(Net(), loader(8, 4), **windows)
    assert (trainer.global_step, trainer.callbacks[0].metric.steps) == (3, 1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    windows |= {"callbacks": [monitor(), GradientAccumulationScheduler({0: 2, 1: 1})], "max_epochs": 3}
    again = trainer_of(**windows)
    again.fit(Net(), loader(8, 4), ckpt_path=tmp_path / "last.ckpt")
    assert (again.global_step, again.callbacks[0].metric.moments) == (5, trainer.callbacks[0].metric.moments)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6, bias=False).double()
        self.head.weight = self.inlet.weight

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.head(x))


class Sharded(Net):
    def configure_model(self):
        fully_shard(self.inlet, mesh=self.device_mesh["data_parallel"])


def refusals():
    """On a rank: what each fit says, before its first step."""
    found = []
    fits = [(Tied, hybrid()), (Net, hybrid(microbatches=1)), (Sharded, ModelParallelStrategy())]
    fits.append((Mixtures, hybrid(pipeline=1, expert_parallel_size=2)))
    for module, strategy in fits:
        trainer = trainer_of(strategy, callbacks=[monitor()])
        try:
            trainer.fit(module(), loader(8, 4))
        except (ValueError, RuntimeError) as refused:
            found.append(str(refused))
        assert trainer.global_step == 0
    return found


def test_tied_stages_and_strategies_that_hide_gradients_are_refused():
    for found in run_trainers(2, refusals):
        assert "Several stages use inlet.weight" in found[0]
        assert "A step has one gradient only" in found[1]
        assert "expert_parallel_size=2: an expert's gradient is of tokens of several replicas" in found[3]
        assert "ModelParallelStrategy shows gradients only when they are summed" in found[2]


class Apart(Net):
    """Squared norms of gradients are 3, 6 and 9 on three ranks: the second one's is the mean."""

    def on_train_start(self):
        self.trainer.strategy.model.register_comm_hook(None, noop_hook)  # Lightning does so on GPUs alone

    def training_step(self, batch, batch_idx):
        return math.sqrt(1 + self.global_rank) * self.unused.sum()


def unsummed():
    """On a rank: what is said where replicas keep their own gradients."""
    strategy = DDPStrategy(find_unused_parameters=True)
    with pytest.raises(RuntimeError) as caught:
        run(Apart(), loader(6, 6, 3), strategy)
    return str(caught.value)


def test_replicas_with_gradients_of_their_own_are_refused_on_all_of_them():
    for rank, found in enumerate(run_trainers(3, unsummed)):
        assert f"is {3 * (1 + rank)} on rank {rank} and 6 in the mean over the replicas" in found
