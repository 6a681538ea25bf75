"""ZeRO within accumulation windows: what is thawed or frozen there, what a failed fit leaves, what replicas call."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from lightning_hybrid.parallel.zero.calls import Calls
from tests.launch import run_trainers
from tests.small import fit, hybrid, loader, trainer_of, weights
from tests.test_zero import BATCH, BATCHES, Model

ACCUMULATE = 3


class Changing(Model):
    """Within the first window it is thawed, within the second one frozen; the last two blocks always train."""

    def __init__(self):
        super().__init__()
        self.set(False)

    def set(self, trained):
        for name, parameter in self.named_parameters():
            if not name.startswith(("blocks.4", "blocks.5")):
                parameter.requires_grad_(trained)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx in (1, 4):
            self.set(batch_idx == 1)


def changing(layouts, data):
    train = loader(BATCHES * BATCH, BATCH, data)
    options = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.05}
    return [weights(fit(Changing(), train, hybrid(1, **layout), **options)) for layout in layouts]


def test_parameters_may_be_thawed_and_frozen_within_a_window():
    ((expected,),) = run_trainers(1, changing, [{"microbatches": 1}], 1)
    layouts = [*({"zero_stage": stage} for stage in range(4)), {"zero_stage": 1, "accumulate_on_cpu": True}]
    for state in run_trainers(2, changing, layouts, 2)[0]:
        assert_close(state, expected, rtol=1e-9, atol=1e-12)


class Failing(Model):
    """Fails within its second window."""

    fails = True

    def training_step(self, batch, batch_idx):
        if self.fails and batch_idx == ACCUMULATE + 1:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


def fitted_again(layouts, data):
    found = []
    for layout in layouts:
        module, trainer = Failing(), trainer_of(hybrid(1, **layout), accumulate_grad_batches=ACCUMULATE)
        train = loader(BATCHES * BATCH, BATCH, data)
        with pytest.raises(ArithmeticError):
            trainer.fit(module, train)
        state = {name: torch.full_like(value, 0.1) for name, value in Model().state_dict().items()}
        trainer.strategy.load_model_state_dict({"state_dict": state})
        module.fails = False
        trainer.fit(module, train)
        found.append(weights(trainer))
    return found


def test_a_window_that_failed_leaves_nothing_to_the_next_fit():
    """The first fit's gradients are in whole parameters that nobody shows, or summed over one group of replicas."""
    layouts = [{"zero_stage": stage} for stage in range(4)] + [{"zero_stage": 2, "replicate_size": 2}]
    ((expected,),) = run_trainers(1, fitted_again, [{"microbatches": 1}], 1)
    for state in run_trainers(2, fitted_again, layouts, 2)[0]:
        assert_close(state, expected, rtol=1e-9, atol=1e-12)


class Skipping(Model):
    """Each replica leaves another block out."""

    def forward(self, x):
        x = self.inlet(x)
        for index, block in enumerate(self.blocks):
            if index != 2 + dist.get_rank():
                x = block(x)
        return self.outlet(x)


def skipped(zero_stage):
    with pytest.raises(RuntimeError, match=f"Replicas called different blocks.*zero_stage={zero_stage}"):
        fit(Skipping(), loader(BATCHES * BATCH, BATCH, 2), hybrid(1, microbatches=1, zero_stage=zero_stage))
    return True


def test_replicas_that_call_different_blocks_are_refused_before_the_first_step():
    """As many blocks are gathered on each replica, so that nothing would fail; the numbers would be wrong."""
    assert run_trainers(2, skipped, 2) == [True, True]


def test_sums_of_digests_tell_whether_calls_were_the_same():
    sides, modules = [Calls(), Calls()], [nn.Identity(), nn.Identity()]
    for calls in sides:
        calls.watch(modules)

    def sums():
        return [sum(numbers) for numbers in zip(*(calls.digest() for calls in sides), strict=True)]

    modules[0](1)
    Calls.check(sums(), 2, 2)
    sides[1].clear()
    with pytest.raises(RuntimeError, match="zero_stage=3"):
        Calls.check(sums(), 2, 3)
    sides[0].clear()
    Calls.check(sums(), 2, 2)


class Fast(Model):
    """A scalar, which stays whole, beside what is sharded."""

    apart = False

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) * self.scale

    def configure_optimizers(self):
        rest = [p for p in self.parameters() if p is not self.scale]
        groups = [{"params": rest}, {"params": [self.scale]}] if self.apart else self.parameters()
        return torch.optim.AdamW(groups, self.rate, eps=1e-3, foreach=True)


class Apart(Fast):
    apart = True


def fast():
    with pytest.raises(ValueError, match=r"AdamW\(foreach=True\) has scale \(1 in all\).*group of their own"):
        fit(Fast(), loader(BATCHES * BATCH, BATCH, 2), hybrid(1, zero_stage=1))
    return weights(fit(Apart(), loader(BATCHES * BATCH, BATCH, 2), hybrid(1, zero_stage=1)))


def test_what_stays_whole_needs_a_group_of_its_own_in_steps_over_many_tensors():
    expected = weights(fit(Fast(), loader(BATCHES * BATCH, BATCH)))
    assert_close(run_trainers(2, fast)[0], expected, rtol=1e-9, atol=1e-12)
