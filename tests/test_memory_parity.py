"""Each technique that saves memory, and each pair of them, leaves every bit of a run as it is."""

from itertools import combinations

import pytest

from lightning_hybrid.callbacks import ActivationOffload, ActivationRecompute, ParameterOffload
from tests.launch import run_trainers
from tests.memory_models import MODELS, bits
from tests.small import hybrid

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*normalises by the statistics of each micro-batch"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


class Pairs(ActivationRecompute):
    """Segments of two blocks; the best ones for blocks that save as much as these are of one."""

    def _apply(self, names):
        super()._apply(names)
        self._recomputation.segments = [position // 2 for position in range(len(names))]


TECHNIQUES = {
    "full": lambda: ActivationRecompute(),
    "sqrt": lambda: Pairs("sqrt"),
    "selective": lambda: ActivationRecompute("selective"),
    "budget": lambda: ActivationRecompute(budget_bytes=80_000),
    "partition": lambda: Pairs("sqrt", partition_over_tensor_axis=True),
    "offload": lambda: ActivationOffload(min_bytes=0),
    "stream": lambda: ParameterOffload(),
}
RECOMPUTES = ("full", "sqrt", "selective", "budget", "partition")
LAYOUTS = {
    "one": lambda: "auto",
    "ddp": lambda: "ddp",
    "pipeline": lambda: hybrid(2, microbatches=4),
    "chunks": lambda: hybrid(2, chunks=2, microbatches=2),
    "zero3": lambda: hybrid(1, microbatches=2, zero_stage=3),
}
EXPERTS = {"experts": lambda: hybrid(1, microbatches=2, zero_stage=3, expert_parallel_size=2)}
TENSOR = {
    "whole": lambda: hybrid(1, tensor_parallel_size=2),
    "sequence": lambda: hybrid(1, tensor_parallel_size=2, sequence_parallel=True),
    "regather": lambda: hybrid(1, tensor_parallel_size=2, sequence_parallel="regather"),
}
PAIRS = [(a, b) for a, b in combinations(TECHNIQUES, 2) if "partition" not in (a, b) and not {a, b} <= set(RECOMPUTES)]
SETS = [*((name,) for name in TECHNIQUES if name != "partition"), *PAIRS]


def callbacks_of(names):
    return [TECHNIQUES[name]() for name in names]


def outcomes(layout, rows):
    """Of each row, a model and names of techniques, what a fit leaves; and of each model without any."""
    found = {}
    for model, names in [*((model, ()) for model in {model for model, _ in rows}), *rows]:
        found[model, names] = bits(model, callbacks_of(names), {**LAYOUTS, **TENSOR, **EXPERTS}[layout]())
    return found


def rows_of(layout, *, is_full):
    """Each technique, and one pair of five, with one of the models, by turns; all of them in the full table."""
    models = list(MODELS)
    shift = list(LAYOUTS).index(layout)
    return [
        (model, names)
        for number, names in enumerate(SETS)
        for index, model in enumerate(models)
        if is_full or (index == (number + shift) % len(models) and (len(names) == 1 or (2 * number + shift) % 5 < 1))
    ]


IS_FULL = pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.full)])


@IS_FULL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bit_is_that_of_a_run_that_holds_everything(layout, is_full):
    size = 1 if layout == "one" else 2
    for found in run_trainers(size, outcomes, layout, rows_of(layout, is_full=is_full), timeout=300):
        for (model, names), outcome in found.items():
            assert outcome == found[model, ()], (model, names)


@pytest.mark.filterwarnings("ignore:.*the whole is gathered at each call")
@pytest.mark.parametrize("layout", TENSOR)
def test_a_tensor_axis(layout):
    rows = [("GPT", (name,)) for name in TECHNIQUES if name != "stream"]  # which is refused there
    for found in run_trainers(2, outcomes, layout, rows, timeout=300):
        for (model, names), outcome in found.items():
            assert outcome == found[model, ()], (model, names)


def test_units_of_zero_within_a_block():
    rows = [("Experts", (name,)) for name in ("full", "sqrt", "selective")]
    for found in run_trainers(2, outcomes, "experts", rows):
        for (model, names), outcome in found.items():
            assert outcome == found[model, ()], (model, names)
