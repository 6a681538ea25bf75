"""Training over a tensor axis: recomputation, precisions, metrics, evaluation and generation as in one process."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from tests.launch import run_trainers
from tests.small import fit, trainer_of, weights
from tests.spoken import GPT2, Checkpointed, CheckpointedLlama, Llama, Spoken, split, texts

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the whole is gathered at each call"),  # argmax of split logits
    pytest.mark.filterwarnings("ignore:You defined a .validation_step."),
]
MODES = [False, True, "regather"]
PRECISE = {"precision": "64-true"}


def trained(model, strategy="auto", **options):
    """Weights and metrics after an epoch of three batches, with validation."""
    trainer = fit(model(), texts(12), strategy, texts(6, seed=1), **{**PRECISE, **options})
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(trainer), metrics


def exact(found, expected):
    (state, metrics), (one_state, one_metrics) = found, expected
    assert_close(dict(state), dict(one_state), rtol=1e-9, atol=1e-12)
    assert metrics == pytest.approx(one_metrics, rel=1e-9)


def near(model):
    """Transformers computes norms in float32, whatever it is given."""
    return {"rtol": 1e-5, "atol": 1e-5} if issubclass(model, CheckpointedLlama) else {"rtol": 1e-9, "atol": 1e-12}


RECOMPUTED = [Checkpointed, CheckpointedLlama]


def recomputed(pipeline):
    modes = MODES if pipeline == 1 else MODES[:2]
    return {
        (model.__name__, mode): trained(model, split(pipeline, sequence_parallel=mode))
        for model in RECOMPUTED
        for mode in modes
    }


@pytest.mark.parametrize("pipeline", [pytest.param(1, marks=pytest.mark.full), 2])
def test_recomputed_blocks_give_the_numbers_of_one_process(pipeline):
    """With torch.utils.checkpoint in the block, and as transformers switches it on."""
    found = run_trainers(2 * pipeline, recomputed, pipeline, timeout=240)[0]
    for model in RECOMPUTED:
        state, metrics = trained(model)
        for mode in MODES if pipeline == 1 else MODES[:2]:
            own_state, own_metrics = found[model.__name__, mode]
            assert_close(dict(own_state), dict(state), **near(model))
            assert own_metrics == pytest.approx(metrics, rel=near(model)["rtol"])


def evaluated(pipeline, mode):
    """What validation, test and prediction give after a fit, on this rank."""
    strategy = split(pipeline, sequence_parallel=mode) if pipeline else "auto"
    module, trainer = Spoken(), trainer_of(strategy, **PRECISE)
    trainer.fit(module, texts(12), texts(6, seed=1))
    validated = trainer.validate(module, texts(7, seed=2), verbose=False)
    tested = trainer.test(module, texts(7, seed=3), verbose=False)
    return validated + tested, trainer.predict(module, texts(7, seed=4))


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
@pytest.mark.parametrize(("pipeline", "mode"), [(1, False), (1, True), (2, False), (2, True)])
def test_evaluation_and_prediction_are_those_of_one_process(pipeline, mode):
    numbers, predictions = evaluated(0, False)
    assert set(numbers[0]) == {"val_loss", "val_accuracy"}
    for own_numbers, own_predictions in run_trainers(2 * pipeline, evaluated, pipeline, mode):
        assert [{name: pytest.approx(v, rel=1e-9) for name, v in n.items()} for n in numbers] == own_numbers
        assert_close(own_predictions, predictions, rtol=1e-9, atol=1e-12)
        assert all(type(prediction) is torch.Tensor for prediction in own_predictions)


class Writing:
    """Continues texts by five words, in predict."""

    sampled = False

    def predict_step(self, batch, batch_idx):
        options = {"do_sample": self.sampled, "max_new_tokens": 5, "min_new_tokens": 5}
        return self.model.generate(batch, attention_mask=torch.ones_like(batch), **options)


class WritingLlama(Writing, Llama):
    pass


class WritingGPT2(Writing, GPT2):
    pass


class SamplingLlama(WritingLlama):
    sampled = True


def written(models, is_split):
    found = []
    for model in models:
        torch.manual_seed(5)
        trainer = trainer_of(split(microbatches=1) if is_split else "auto", **PRECISE)
        found.append(trainer.predict(model(), texts(5, seed=1)))
    return found


def test_transformers_generate_in_predict():
    """Greedy words are those of one process, sampled ones the same on all ranks."""
    greedy = [WritingLlama, WritingGPT2]
    first, second = run_trainers(2, written, [*greedy, SamplingLlama], True, timeout=240)
    assert_close(first, second, rtol=0, atol=0)
    assert_close(first[:2], written(greedy, False), rtol=0, atol=0)
    assert all(batch.shape[1] == texts(1).dataset[0].shape[0] + 5 for batch in first[2])


LOW = ["bf16-mixed", "bf16-true"]


def in_low_precision():
    cases = [(precision, mode) for precision in LOW for mode in (False, True)]
    return {case: trained(Spoken, split(sequence_parallel=case[1]), precision=case[0]) for case in cases}


def test_low_precision_stays_near_float32():
    _, expected = trained(Spoken, precision="32-true")
    for state, metrics in run_trainers(2, in_low_precision, timeout=240)[0].values():
        assert metrics["val_loss"] == pytest.approx(expected["val_loss"], rel=0.03)
        assert metrics["train_loss"] == pytest.approx(expected["train_loss"], rel=0.03)
        assert {value.dtype for name, value in state.items() if name.startswith("model")} == {torch.float32}


class Surprising(Spoken):
    """Sorts the hidden features of an activation: no rule says what that does to a split tensor."""

    class block(Spoken.block):
        def forward(self, x):
            hidden = self.mlp["c_fc"](self.ln_2(x + self.attn(self.ln_1(x))))
            return x + self.mlp["c_proj"](torch.sort(hidden, dim=-1).values.tanh())


def surprised():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = trained(Surprising, split())
    return outcome, [str(w.message) for w in caught if "sort" in str(w.message)]


def test_an_operation_without_a_rule_is_exact_and_said_once():
    (outcome, messages), _ = run_trainers(2, surprised)
    exact(outcome, trained(Surprising))
    assert len(messages) == 1
