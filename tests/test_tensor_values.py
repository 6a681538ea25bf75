"""What leaves a step under tensor parallelism is whole, though the step itself has computed with parts of it."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError
from torchmetrics.utilities import dim_zero_cat

from tests.launch import run_trainers
from tests.small import WIDTH, Small, hybrid, samples, trainer_of, weights

CLASSES = 5  # not divisible by the number of ranks
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "vocab"}
QUIET = pytest.mark.filterwarnings("ignore:.*has no rule for parts")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class KeepsEverything(MeanSquaredError):
    """A metric that keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.add_state("given", [], dist_reduce_fx="cat")

    def update(self, found, wanted):
        self.given.append(found.detach())

    def compute(self):
        return dim_zero_cat(self.given).square().sum()


class Classes(Small):
    """Hands out its scores, of which each rank has some, in every way that users do."""

    block, depth = Block, 4

    def __init__(self, returns_scores):
        super().__init__()
        self.returns_scores = returns_scores
        torch.manual_seed(4)
        self.head = nn.Linear(WIDTH, CLASSES).double()
        self.error, self.kept = MeanSquaredError().set_dtype(torch.float64), KeepsEverything()
        self.scores, self.best = [], None

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        scores = self(batch[0])
        loss = F.cross_entropy(scores, wanted(batch))
        return {"loss": loss, "scores": scores.detach()} if self.returns_scores else loss

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.scores.append(scores)
        self.error(scores, torch.zeros_like(scores))
        self.kept.update(scores, None)
        self.log("error", self.error)
        if self.returns_scores:  # where all ranks are in the same step
            self.log("gathered", self.all_gather(scores).square().sum())
        self.log("largest", scores.max(), reduce_fx="max")
        best = scores.max(dim=0).values
        self.best = best if self.best is None else torch.maximum(self.best, best)

    def on_validation_epoch_end(self):
        everything = torch.cat(self.scores)
        self.scores.clear()
        self.log("spread", everything.std())
        self.log("kept", self.kept.compute())
        self.log("best", self.best.sum())
        self.kept.reset()
        self.best = None

    def predict_step(self, batch, batch_idx):
        return {"scores": self(batch[0])}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def wanted(batch):
    return batch[0].sum(1).abs().long() % CLASSES


class Returned(Callback):
    def __init__(self):
        self.scores = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.scores.append(outputs["scores"])


def outcome(strategy, microbatches):
    """Scores that the step returned (where a step sees a whole batch), metrics, weights, predictions; twice fitted."""
    torch.manual_seed(1)
    callback = Returned()
    trainer = trainer_of(strategy, gradient_clip_val=0.05, callbacks=[callback] if microbatches == 1 else [])
    module = Classes(microbatches == 1)
    data = DataLoader(samples(8), 4)
    trainer.fit(module, data, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = torch.cat([part["scores"] for part in trainer.predict(module, data)])
    return callback.scores, metrics, dict(weights(trainer)), predictions, [type(x).__name__ for x in callback.scores]


def split(pipeline, microbatches, options):
    return outcome(
        hybrid(pipeline, 1, microbatches, tensor_parallel_size=2, tensor_parallel_plan=PLAN, **options), microbatches
    )


@QUIET
@pytest.mark.parametrize(("pipeline", "microbatches"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["", "sequence"])
def test_outputs_metrics_and_predictions_are_those_of_one_process(pipeline, microbatches, options):
    results = run_trainers(2 * pipeline, split, pipeline, microbatches, options)
    scores, metrics, state, predictions, _ = outcome("auto", microbatches)
    for mine, found, _, predicted, kinds in results:
        assert set(kinds) <= {"Tensor"}
        torch.testing.assert_close(mine, scores, rtol=1e-9, atol=1e-12)
        assert found == pytest.approx(metrics, rel=1e-7)
        torch.testing.assert_close(predicted, predictions, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[0][2], state, rtol=1e-9, atol=1e-12)


class CallsItself(Classes):
    """Calls the model in a hook, where ranks would compute with their slices alone."""

    def on_train_epoch_end(self):
        self(torch.ones(2, WIDTH, dtype=torch.float64))


def called_outside():
    messages, data = [], DataLoader(samples(8), 4)
    module = Classes(False)
    trainer_of(hybrid(1, 1, 1, tensor_parallel_size=2, tensor_parallel_plan=PLAN)).fit(module, data, data)
    for call in (
        lambda: module(torch.ones(2, WIDTH, dtype=torch.float64)),
        lambda: trainer_of(hybrid(1, 1, 1, tensor_parallel_size=2, tensor_parallel_plan=PLAN)).fit(
            CallsItself(False), data, data
        ),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


@QUIET
def test_the_model_is_not_called_outside_steps():
    for messages in run_trainers(2, called_outside):
        for message in messages:
            assert "blocks.0.up was called outside a step, and each of 2 ranks holds a slice of it." in message


class Manual(Classes):
    """Adds up two backward passes, clips, and steps."""

    def __init__(self):
        super().__init__(False)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for factor in (1.0, 3.0):
            self.manual_backward(factor * F.cross_entropy(self(batch[0]), wanted(batch)))
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


def manual(strategy):
    trainer, module, data = trainer_of(strategy), Manual(), DataLoader(samples(8), 4)
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data, data)
    return before, dict(weights(trainer))


def manual_split(sequence_parallel):
    return manual(
        hybrid(1, 1, 1, tensor_parallel_size=2, tensor_parallel_plan=PLAN, sequence_parallel=sequence_parallel)
    )


@QUIET
@pytest.mark.parametrize("sequence_parallel", [False, True, "regather"])
def test_validation_alone_and_manual_optimization_are_those_of_one_process(sequence_parallel):
    results = run_trainers(2, manual_split, sequence_parallel)
    before, state = manual("auto")
    for found, _ in results:
        assert found == pytest.approx(before, rel=1e-7)
    torch.testing.assert_close(results[0][1], state, rtol=1e-9, atol=1e-12)
