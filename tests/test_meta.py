"""Models that are built on the meta device start and train alike in every layout, and no rank ever has all of them."""

from functools import cache

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.testing import assert_close

from tests.launch import run_trainers
from tests.meta_models import (
    Around,
    Compiled,
    Llama,
    Manual,
    Meta,
    Norms,
    Recurrences,
    Shared,
    SharedModule,
    Tied,
    word_loader,
)
from tests.small import fit, hybrid, weights

MODELS = {
    "meta": Meta,
    "tied": Tied,
    "norms": Norms,
    "llama": Llama,
    "recurrences": Recurrences,
    "compiled": Compiled,
    "manual": Manual,
    "shared": Shared,
    "shared module": SharedModule,
    "around": Around,
}
TWO = [
    {"pipeline": 2},
    {"pipeline": 2, "chunks": 2},
    *({"pipeline": 1, "zero_stage": stage} for stage in range(4)),
    {"pipeline": 1, "tensor_parallel_size": 2},
]
FOUR = [
    {"pipeline": 2, "zero_stage": 3},
    {"pipeline": 2, "zero_stage": 3, "tensor_parallel_size": 2},
    {"pipeline": 1, "zero_stage": 3, "replicate_size": 2},
    {"pipeline": 1, "zero_stage": 3, "tensor_parallel_size": 2},
]


class Start(Callback):
    """Keeps the weights of before the first step if they are wanted: a rank then holds all of its own."""

    def __init__(self, *, wanted=True):
        self.wanted, self.state = wanted, None

    def on_train_start(self, trainer, pl_module):
        if self.wanted:
            state = trainer.strategy.lightning_module_state_dict()
            self.state = {name: value.clone() for name, value in state.items()}


def run(model, strategy, data=1, callbacks=(), **options):
    tensor = 1 if strategy == "auto" else strategy.options["tensor_parallel_size"]
    place = dist.get_rank() // tensor % data if data > 1 else 0
    train, val = word_loader(24, 8, data, place), word_loader(4, 2)
    options = {"num_sanity_val_steps": 1, "use_distributed_sampler": False, **options}
    options["inference_mode"] = not isinstance(model, Recurrences)
    options |= {"gradient_clip_val": 0.05} if model.automatic_optimization else {}
    return fit(model, train, strategy, val, callbacks=list(callbacks), **options)


def trained(cases):
    found = []
    for name, layout, wanted in cases:
        size = dist.get_world_size()
        data = size // layout["pipeline"] // layout.get("tensor_parallel_size", 1)
        start = Start(wanted=wanted)
        trainer = run(MODELS[name](), hybrid(**{"microbatches": 2 if name != "norms" else 1, **layout}), data, [start])
        found.append((weights(trainer), start.state, float(trainer.callback_metrics["val"])))
    return found


@cache
def reference(name):
    """Plain Lightning, and a model that is built on the CPU and given the values that the other one starts with."""
    ((alone, start, val),) = run_trainers(1, trained, [(name, {"pipeline": 1, "microbatches": 1}, True)])[0]
    model = MODELS[name](real=True)
    model.configure_model()
    model.load_state_dict(start)
    for buffer in (b for n, b in model.named_buffers() if n not in start and n == "scale"):
        buffer.fill_(2.0)
    trainer = run(model, "auto")
    assert_close(dict(alone), dict(weights(trainer)), rtol=1e-9, atol=1e-12)
    assert val == pytest.approx(float(trainer.callback_metrics["val"]), rel=1e-9)
    return start, alone, val


def check(size, cases):
    for case, found in zip(cases, run_trainers(size, trained, cases, timeout=300)[0], strict=True):
        start, end, val = reference(case[0])
        assert_close(dict(found[0]), dict(end), rtol=1e-9, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")
        assert found[2] == pytest.approx(val, rel=1e-9)
        if case[2]:
            assert_close(found[1], start, rtol=0, atol=0, msg=lambda m, c=case: f"{c}: {m}")


def test_two_processes_start_and_train_as_one():
    check(2, [(name, layout, name == "meta") for name in ("meta", "tied") for layout in TWO])


def test_four_processes_start_and_train_as_one():
    check(4, [(name, layout, name == "meta") for name in ("meta", "tied") for layout in FOUR])


@pytest.mark.filterwarnings("ignore:zero_stage=3 does not apply to manual optimization")
def test_models_of_other_kinds_start_and_train_as_in_one_process():
    pipelines, zero3 = [{"pipeline": 2}, {"pipeline": 2, "chunks": 2}], {"pipeline": 1, "zero_stage": 3}
    cases = [
        *(("norms", layout, True) for layout in pipelines),
        *(("shared", layout, True) for layout in (*pipelines, zero3)),
        *(("shared module", layout, True) for layout in (pipelines[1], zero3)),
        *(("around", layout, True) for layout in (pipelines[0], zero3)),
        *(("llama", layout, False) for layout in (*pipelines, zero3, {"pipeline": 1, "tensor_parallel_size": 2})),
        ("compiled", {**zero3, "microbatches": 1}, False),
        ("recurrences", zero3, False),
        ("recurrences", {**zero3, "cpu_offload": True}, False),
        ("manual", {**zero3, "microbatches": 1}, True),
    ]
    check(2, cases)


def test_shards_of_one_process_in_host_memory():
    check(1, [(name, {"pipeline": 1, "zero_stage": 3, "cpu_offload": True}, False) for name in ("meta", "tied")])
