"""Manual optimization with several optimizers, over replicas: the numbers of one process, saved and resumed."""

from contextlib import nullcontext as quiet

import pytest
import torch
from torch import nn
from torch.distributed import get_rank as rank

from tests.launch import run_trainers
from tests.small import WIDTH, Small, Watch, assert_same, hybrid, loader, trainer_of, weights


class Adversarial(Small):
    """Two optimizers that take turns, each with a backward pass or two of its own; the second clips."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(WIDTH, 1).double()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        self.manual_backward(self.loss(batch) / 2)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        error = (self.critic(batch[0]) - self(batch[0]).detach()).square().mean()
        self.manual_backward(error)
        self.clip_gradients(second, gradient_clip_val=0.1)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.lr_schedulers().step()
        self.log("loss", loss)
        self.log("error", error, on_step=True, on_epoch=True)
        return {"loss": loss, "error": error.detach()}

    def configure_optimizers(self):
        model = [p for name, p in self.named_parameters() if "critic" not in name]
        first = torch.optim.SGD(model, 0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
        second = torch.optim.AdamW(self.critic.parameters(), 0.01)
        return [{"optimizer": first, "lr_scheduler": schedule}, {"optimizer": second}]


def played(data, folder, resume):
    """Two epochs of which the last batch is uneven, or the second of them from a checkpoint."""
    strategy = hybrid(1, microbatches="auto", zero_stage=0) if data else "auto"
    watch = Watch()
    trainer = trainer_of(strategy, max_epochs=2 if resume else 1, callbacks=[watch], log_every_n_steps=1)
    path = folder / f"{data}.ckpt"
    trainer.fit(Adversarial(), loader(14, 4, data or 1), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return watch.seen, weights(trainer)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same", "one process"])
def test_manual_optimization_over_replicas_is_that_of_one_process(data, elsewhere, tmp_path):
    """Case 48."""
    expected = [played(None, tmp_path, resume) for resume in (False, True)]
    first = run_trainers(data, played, data, tmp_path, False)
    if elsewhere:
        (tmp_path / f"{data}.ckpt").rename(tmp_path / "None.ckpt")
        outcomes = [first, [played(None, tmp_path, True)]]
    else:
        outcomes = [first, run_trainers(data, played, data, tmp_path, True)]
    for found, (seen, state) in zip(outcomes, expected, strict=True):
        for own, _ in found:
            assert_same(own, seen)
        torch.testing.assert_close(dict(found[0][1]), dict(state))


class PastTheStrategy(Adversarial):
    def training_step(self, batch, batch_idx):
        first, _ = self.optimizers()
        self.loss(batch).backward()
        first.step()


def past():
    with pytest.raises(
        RuntimeError, match=r"loss.backward\(\) leaves each of the 2 replicas.*Call self.manual_backward"
    ):
        trainer_of(hybrid(1, microbatches=1, zero_stage=0)).fit(PastTheStrategy(), loader(8, 4, 2))
    with (
        pytest.warns(UserWarning, match="zero_stage=1 does not apply to manual optimization")
        if rank() == 0
        else quiet()
    ):
        trainer_of(hybrid(1, microbatches=1)).fit(Adversarial(), loader(8, 4, 2))


def test_a_backward_pass_past_the_strategy_is_refused_before_the_first_step():
    run_trainers(2, past)


class Closing(Small):
    """Its backward passes are in the optimizer's closure."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def closed(data):
    trainer = trainer_of(hybrid(1, microbatches=1, zero_stage=0) if data > 1 else "auto")
    trainer.fit(Closing(), loader(16, 4, data))
    return dict(weights(trainer))


def test_backward_passes_may_be_in_the_optimizers_closure():
    torch.testing.assert_close(run_trainers(2, closed, 2)[0], closed(1))
