"""Tensor plans that cannot be are refused in one line, on every rank, before anything is trained."""

import re
import warnings

import pytest
import torch

from tests.launch import run_trainers
from tests.small import trainer_of
from tests.spoken import Llama, Spoken, split, texts

PLANS = {  # options, and what the error names
    "unknown module": ({"tensor_parallel_plan": {"*.nothing": "colwise"}}, r"\*\.nothing"),
    "unknown style": ({"tensor_parallel_plan": {"*.c_attn": "sideways"}}, r"sideways.*colwise"),
    "no matrix": ({"tensor_parallel_plan": {"*.ln_1": "colwise"}}, r"ln_1"),
    "unknown plan": ({"tensor_parallel_plan": "best"}, r"best"),
    "odd size": ({"tensor": 3}, r"3"),
    "unknown mode": ({"sequence_parallel": "sometimes"}, r"sometimes.*regather"),
    "size of no number": ({"tensor": 0}, r"tensor_parallel_size.*0"),
}


class OnePair(Llama):
    @staticmethod
    def make():
        model = Llama.make()
        config = type(model.config)(**{**model.config.to_dict(), "num_key_value_heads": 1})
        return type(model)(config)


MODELS = {  # models that two ranks cannot share, and the numbers that the error names
    OnePair: ({"tensor_parallel_plan": "auto"}, r"1.*2|2.*1"),
}


def refused(model, options):
    """The error, and whether nothing has changed."""
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        trainer_of(split(**options)).fit(module, texts(4))
    own = module.state_dict()
    untouched = all(torch.equal(before[name], own[name]) for name in before)
    return str(caught.value), untouched


def all_refused():
    cases = [(Spoken, options) for options, _ in PLANS.values()]
    return [refused(*case) for case in cases + [(model, options) for model, (options, _) in MODELS.items()]]


@pytest.mark.filterwarnings("ignore:You defined a .validation_step.")
def test_wrong_plans_are_errors_of_one_line_before_training():
    patterns = [pattern for _, pattern in [*PLANS.values(), *MODELS.values()]]
    for outcomes in run_trainers(2, all_refused):
        for (message, untouched), pattern in zip(outcomes, patterns, strict=True):
            assert "\n" not in message
            assert re.search(pattern, message), message
            assert untouched, message


def warned_of():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(split(tensor_parallel_plan={"*.h": "replicated"})).fit(Spoken(), texts(4))
    return [str(w.message) for w in caught if "splits nothing" in str(w.message)]


def test_a_plan_that_splits_nothing_is_warned_of_once():
    [message], none = run_trainers(2, warned_of)
    assert "tensor_parallel_size=2 splits nothing" in message
    assert none == []
