import io
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.callbacks import CommunicationLedger, MemoryLedger
from lightning_hybrid.functional.traffic import pipeline_bytes, ring_bytes
from lightning_hybrid.parallel.ledgers.traffic import Row, Traffic
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader, trainer_of, weights

BATCH = 8


class Even(Small):
    """Every parameter's first dimension can be halved, so that shards need no padding."""

    def __init__(self):
        super().__init__()
        self.outlet = nn.Linear(WIDTH, 2).double()

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y.expand(-1, 2))


class Tied(Even):
    """The same weights at both ends of the pipeline."""

    def forward(self, x):
        return F.linear(super().forward(x), self.inlet.weight[:, :2])

    def loss(self, batch):
        return self(batch[0]).square().mean()


def ledger_of(strategy, data=1, accumulate=1, module=Even, steps=3, **options):
    """Fits for a few steps; returns the trainer and the ledger."""
    ledger = CommunicationLedger()
    train = loader(steps * accumulate * BATCH, BATCH, data)
    trainer = fit(
        module(), train, strategy, callbacks=[ledger, *options.pop("callbacks", [])],
        accumulate_grad_batches=accumulate, log_every_n_steps=1, **options,
    )  # fmt: skip
    assert ledger.num_steps == steps
    return trainer, ledger


def gradient_bytes(trainer):
    return sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters())


def check_pipeline(chunks, accumulate, zero_stage, schedule, microbatches):
    strategy = hybrid(2, chunks, microbatches, zero_stage=zero_stage, schedule=schedule)
    _, ledger = ledger_of(strategy, accumulate=accumulate)
    payload = BATCH // microbatches * WIDTH * 8
    expected = pipeline_bytes(payload, num_microbatches=microbatches * accumulate, num_stages=2 * chunks)
    calls = microbatches * accumulate * (2 * chunks - 1)
    for phase in ("forward", "backward"):
        assert ledger.world["pipeline", phase, "send", "float64"] == Traffic(calls, expected, expected)
        assert ledger.world["pipeline", phase, "recv", "float64"] == Traffic(calls, expected, 0.0)
    assert not any(row.axis in ("data", "holders") for row in ledger.world)


def check_replicas(accumulate, replicas=2):
    """Stage 0: one sum of all gradients a step, however many batches a step has."""
    trainer, ledger = ledger_of(hybrid(1, zero_stage=0), replicas, accumulate)
    size = gradient_bytes(trainer)
    counted = {row: traffic for row, traffic in ledger.last.items() if row.dtype == "float64" and row.axis == "data"}
    assert counted == {
        Row("data", "backward", "all_reduce", "float64"): Traffic(1, size, 2 * (replicas - 1) / replicas * size)
    }
    counts = ledger.last["data", "step", "all_reduce", "int32"]  # ranks with a gradient of each, in time and late
    assert counts.payload == 2 * 4 * len(list(trainer.lightning_module.parameters()))


def check_ddp(accumulate):
    trainer, ledger = ledger_of("ddp", 2, accumulate)
    size = gradient_bytes(trainer)
    assert ledger.last == {Row("world", "backward", "all_reduce", "float64"): Traffic(1, size, size)}


def check_shards(accumulate):
    """Stage 1: one reduce-scatter of gradients and one all-gather of parameters a step."""
    trainer, ledger = ledger_of(hybrid(1, zero_stage=1), 2, accumulate)
    size = gradient_bytes(trainer)
    scatter = ledger.last["data", "backward", "all_to_all", "float64"]
    gather = ledger.last["data", "forward", "all_gather", "float64"]
    assert (scatter.payload, scatter.wire) == (size, ring_bytes("all_to_all", size, 2))
    assert (gather.payload, gather.wire) == (size / 2, ring_bytes("all_gather", size, 2))
    assert scatter.wire + gather.wire == ring_bytes("all_reduce", size, 2)
    assert scatter.calls == gather.calls == 1
    assert not any(row.dtype == "float64" and row.axis == "data" for row in ledger.last.keys() - {
        Row("data", "backward", "all_to_all", "float64"), Row("data", "forward", "all_gather", "float64")
    })  # fmt: skip


def check_holders():
    trainer, ledger = ledger_of(hybrid(2, zero_stage=0), module=Tied)
    size = trainer.lightning_module.inlet.weight.numel() * 8
    assert ledger.last["holders", "step", "all_reduce", "float64"] == Traffic(1, size, size)


def check_numbers():
    """Both ledgers leave weights and losses as they are; what they log is equal on every rank."""
    output = io.StringIO()
    with redirect_stdout(output):
        plain = fit(Even(), loader(3 * BATCH, BATCH), hybrid(2))
        watched, ledger = ledger_of(hybrid(2), callbacks=[MemoryLedger()])
    before, after = weights(plain), weights(watched)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    logged = {name: float(value) for name, value in watched.callback_metrics.items()}
    assert logged["communication/pipeline/forward/payload_bytes"] == BATCH * WIDTH * 8
    world = [traffic for row, traffic in ledger.world.items() if row.axis == "world"]
    assert logged["communication/world/step/wire_bytes"] == sum(traffic.wire for traffic in world)
    return logged, output.getvalue()


def two_ranks():
    for case in [(1, 1, 1, "1f1b", 4), (2, 2, 0, "auto", 2)]:
        check_pipeline(*case)
    check_replicas(accumulate=2)
    check_shards(accumulate=2)
    check_ddp(accumulate=2)
    check_holders()
    return check_numbers()


@pytest.fixture(scope="module")
def results():
    return run_trainers(2, two_ranks)


def test_traffic_is_what_the_formulas_say(results):
    assert len(results) == 2


def test_what_is_logged_is_equal_on_all_ranks(results):
    (first, _), (second, _) = results
    assert first == second
    assert {name.split("/")[0] for name in first} == {"communication", "memory"}


def test_rank_0_prints_a_table_once(results):
    (_, first), (_, second) = results
    assert first.count("Communication in an optimizer step") == 1
    assert first.count("pipeline") >= 3
    assert "Communication" not in second


def four_ranks():
    check_replicas(accumulate=1, replicas=4)
    whole = {}
    results = []
    for accumulate in (1, 2):
        trainer, ledger = ledger_of(hybrid(2, zero_stage=1), 2, accumulate, steps=2)
        count = ledger.last["data", "backward", "all_to_all", "float64"]
        size = sum(p.numel() * 8 for p in trainer.lightning_module.parameters())
        blocks = len({name.split(".")[0] for name, _ in trainer.lightning_module.blocks.named_parameters()})
        results.append((count.calls, blocks + 1, count.payload, size))
        whole[accumulate] = weights(trainer)
    return results, whole


def test_a_pipeline_of_shards_reduces_once_a_step_and_accumulation_adds_nothing():
    """Case 38: reduce-scatters at the boundary of an accumulation window."""
    results = run_trainers(4, four_ranks)
    for counts, _ in results:
        for calls, groups, payload, size in counts:
            assert calls == groups  # each block of the stage once, and once what is outside blocks
            assert payload == size
    reference = fit(Even(), loader(4 * BATCH, BATCH), accumulate_grad_batches=2)
    state = results[0][1][2]
    for name, value in reference.lightning_module.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_one_process_has_no_traffic(capsys):
    _, ledger = ledger_of("auto")
    assert ledger.last == ledger.total == ledger.world == {}
    assert "Communication in an optimizer step (number 3)" in capsys.readouterr().out


def by_hand():
    with CommunicationLedger() as ledger:
        dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))
    expected = {Row("world", "step", "all_reduce", "float32"): Traffic(1, 16, 16.0)}
    assert ledger.last == ledger.total == ledger.world == expected


class Failing(Even):
    def training_step(self, batch, batch_idx):
        raise ArithmeticError


def after_a_failure():
    ledger = CommunicationLedger()
    with pytest.raises(ArithmeticError):
        trainer_of("ddp", callbacks=[ledger]).fit(Failing(), loader(BATCH, BATCH, 2))
    dist.all_reduce(torch.ones(4))
    assert not any(row.collective == "all_reduce" for row in ledger._counter.counts)


def outside_a_fit():
    by_hand()
    after_a_failure()
    return True


def test_as_a_context_manager_it_counts_the_block_and_a_failed_fit_leaves_nothing_active():
    assert run_trainers(2, outside_a_fit) == [True, True]
