import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.callbacks import CommunicationLedger, MemoryLedger
from lightning_hybrid.functional.memory import state_bytes
from lightning_hybrid.functional.timeline import ELSEWHERE
from lightning_hybrid.parallel.ledgers.fates import announce
from lightning_hybrid.parallel.ledgers.fixed import FixedStorages
from lightning_hybrid.parallel.memory.hooks import ChainedHooks
from tests.callbacks.test_communication_ledger import BATCH, Even, Failing
from tests.callbacks.test_expert_monitor import is_picture
from tests.launch import run_trainers
from tests.small import WIDTH, Block, Small, fit, hybrid, loader, trainer_of, weights

LINEAR = (WIDTH * WIDTH + WIDTH) * 8  # bytes of one layer's parameters
SAVED = BATCH * WIDTH * 8  # bytes of what one layer gets or gives


class Adam(Even):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate)


class Frozen(Even):
    def __init__(self):
        super().__init__()
        self.inlet.requires_grad_(False)


def ledger_of(module, strategy="auto", data=1, steps=2, **options):
    ledger = MemoryLedger(depth=options.pop("depth", None))
    trainer = fit(module, loader(steps * BATCH, BATCH, data), strategy, callbacks=[ledger], **options)
    return trainer, ledger


def whole(module):
    return sum(p.numel() * 8 for p in module.parameters())


def test_one_process_keeps_what_a_calculation_by_hand_says(capsys):
    module = Even()
    _, ledger = ledger_of(module, depth=1)
    totals, size = ledger.peak.totals(), whole(module)
    assert totals["trainable"] == totals["gradients"] == totals["states"] == size
    assert totals["states"] == state_bytes(size, copies=1)
    assert ledger.peak.activations == {
        "inlet": SAVED,  # the batch
        **{f"blocks.{i}.linear": SAVED for i in range(6)},  # its input, which the sum with it does not need
        **{f"blocks.{i}": SAVED for i in range(6)},  # what tanh gave
        "outlet": SAVED,
        "": BATCH * (2 + 1) * 8,  # the loss's prediction and target, which is expanded from one column
    }
    assert ledger.ranks == [totals]
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "blocks" in line)
    assert [f"{number:,}" in row for number in (6 * LINEAR, 12 * SAVED)] == [True, True]
    assert "all ranks" not in printed


def test_states_of_adam_are_two_copies_and_a_counter_each():
    module = Adam()
    _, ledger = ledger_of(module)
    expected = state_bytes(whole(module), copies=2, num_steps=len(list(module.parameters())))
    assert ledger.peak.totals()["states"] == expected
    assert ledger.peak.states["outlet"] == 2 * (WIDTH * 2 + 2) * 8 + 2 * 4


def test_frozen_parameters_stand_apart_and_have_neither_gradients_nor_states():
    _, ledger = ledger_of(Frozen())
    assert ledger.peak.frozen == {"inlet": LINEAR}
    for of_module in (ledger.peak.trainable, ledger.peak.gradients, ledger.peak.states, ledger.peak.activations):
        assert "inlet" not in of_module


def test_a_step_of_several_batches_peaks_as_its_largest():
    _, once = ledger_of(Even())
    _, twice = ledger_of(Even(), accumulate_grad_batches=2)
    assert once.peak == twice.peak


def shards():
    """(total of each category, with plain replication and with sharded states), the step's logs."""
    _, plain = ledger_of(Adam(), hybrid(1, zero_stage=0), 2)
    trainer, sharded = ledger_of(Adam(), hybrid(1, zero_stage=1), 2, log_every_n_steps=1)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return plain.peak.totals(), sharded.peak.totals(), sharded.ranks, logged


def pipelines():
    """Memory of this stage by schedule."""
    options = {"zero_stage": 0, "microbatches": 4, "partition": [2, 4]}
    return {name: ledger_of(Even(), hybrid(2, schedule=name, **options))[1].peak for name in ("gpipe", "1f1b")}


class CheckpointedBlock(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Checkpointed(Even):
    block = CheckpointedBlock


def checkpoints():
    """Under checkpoints a stage has saved-tensor hooks of its own: weights without and with the ledger, its peak."""
    options = {"zero_stage": 0, "microbatches": 4, "partition": [2, 4], "schedule": "gpipe"}
    plain = fit(Checkpointed(), loader(2 * BATCH, BATCH), hybrid(2, **options))
    watched, ledger = ledger_of(Checkpointed(), hybrid(2, **options))
    return weights(plain), weights(watched), ledger.peak


def two_ranks():
    return shards(), pipelines(), checkpoints()


@pytest.fixture(scope="module")
def results():
    return run_trainers(2, two_ranks)


def test_sharded_states_are_halved_and_the_rest_is_not(results):
    size, counters = whole(Adam()), len(list(Adam().parameters()))
    for (plain, sharded, ranks, logged), *_ in results:
        assert plain["states"] == state_bytes(size, copies=2, num_steps=counters)
        assert sharded["states"] == state_bytes(size, copies=2, num_steps=counters, num_shards=2)
        assert (plain["trainable"], sharded["trainable"]) == (size, size / 2)
        assert plain["gradients"] == sharded["gradients"] == size  # whole until the last backward pass reduces them
        assert plain["activations"] == sharded["activations"]  # gathered parameters are no activations
        assert ranks == [sharded, sharded]
        assert logged == {f"memory/{name}_bytes": number for name, number in sharded.items()}


def test_a_pipeline_keeps_activations_of_the_micro_batches_in_flight(results):
    micro_batch = SAVED // 4
    for _, peaks, _ in results:
        assert peaks.keys() == {"gpipe", "1f1b"}
    first = results[0][1]
    for name, in_flight in (("gpipe", 4), ("1f1b", 2)):
        # each block's input and tanh for every micro-batch in flight, and the batch once
        assert first[name].totals()["activations"] == in_flight * 2 * 2 * micro_batch + SAVED
        assert first[name].totals()["trainable"] == 3 * LINEAR
    last = results[1][1]["1f1b"]
    assert last.activations["blocks.5.linear"] == micro_batch


def test_checkpoints_in_a_pipeline_keep_inputs_and_one_block(results):
    micro_batch = SAVED // 4
    for _, _, (plain, watched, peak) in results:
        assert all(torch.equal(plain[name], watched[name]) for name in plain)
        assert sum(peak.activations.values()) > 0
    assert results[0][2][0].keys() == results[0][2][1].keys() != set()
    # of the first stage each block's input for each micro-batch, the batch, and the tanh of one recomputed block
    assert results[0][2][2].totals()["activations"] == 4 * 2 * micro_batch + SAVED + micro_batch


def test_as_a_context_manager_it_measures_the_block():
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    with MemoryLedger(module=net, optimizers=[optimizer]) as ledger:
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert ledger.last == ledger.peak
    expected = {"trainable": 32, "gradients": 32, "states": 72, "activations": 48}
    assert ledger.peak.totals() == {**dict.fromkeys(vars(ledger.peak), 0), **expected}


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match=r"MemoryLedger\(module=...\)"), MemoryLedger():
        pass
    with pytest.raises(ValueError, match="depth=-1"):
        MemoryLedger(depth=-1)


class Skipping(Small):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


class FailsBackward(Even):
    step = 0

    def backward(self, loss):
        if self.global_step == self.step:
            raise ArithmeticError("in a backward pass")
        super().backward(loss)


class FailsLater(FailsBackward):
    step = 1


@pytest.mark.parametrize("module", [Failing, Skipping])
def test_an_early_end_leaves_no_hooks(module):
    enter, ledgers = saved_tensors_hooks.__enter__, [MemoryLedger(), CommunicationLedger()]
    try:
        trainer_of(callbacks=ledgers).fit(module(), loader(3 * BATCH, BATCH))
    except ArithmeticError:
        assert module is Failing
    assert saved_tensors_hooks.__enter__ is enter
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        torch.ones(1, requires_grad=True).exp()
    assert len(seen) == 1


class Away(Callback):
    """Takes all activations that the first block saves, as other callbacks for memory would, and announces them."""

    class Packed:
        def __init__(self, tensor, fate):
            self.value, self.releases = tensor, [announce(tensor, fate)]
            if fate == "compressed":
                self.half = tensor.float()
                self.releases.append(announce(self.half, "kept", self.releases[0]))

        def unpack(self):
            return self.value

        def __del__(self):
            for release in self.releases:
                release()

    def __init__(self, fate):
        self.fate = fate

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        fixed = FixedStorages(pl_module)
        fixed.start()

        def pack(tensor):
            takes = pl_module.blocks[0] in fixed.running.now() and not fixed.is_fixed(tensor)
            return self.Packed(tensor, self.fate) if takes else None

        self.hooks = ChainedHooks(pack)
        self.hooks.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.hooks.__exit__()


@pytest.mark.parametrize(("fate", "stays"), [("offloaded", 0), ("compressed", SAVED // 2)])
def test_the_order_of_callbacks_with_hooks_of_their_own_does_not_matter(fate, stays, capsys):
    plain, peaks = weights(fit(Even(), loader(2 * BATCH, BATCH))), []
    for order in (1, -1):
        ledger = MemoryLedger(depth=1)
        trainer = fit(Even(), loader(2 * BATCH, BATCH), callbacks=[ledger, Away(fate)][::order], log_every_n_steps=1)
        assert all(torch.equal(weights(trainer)[name], plain[name]) for name in plain)
        peaks.append(ledger.peak)
    assert peaks[0] == peaks[1]
    assert getattr(peaks[0], fate) == {"blocks.0.linear": SAVED, "blocks.0": SAVED}
    assert peaks[0].activations.get("blocks.0.linear", 0) == peaks[0].activations.get("blocks.0", 0) == stays
    assert peaks[0].totals()["activations"] == (1 + 10 + 1) * SAVED + 2 * stays + BATCH * (2 + 1) * 8
    printed = capsys.readouterr().out
    for column in ELSEWHERE:
        assert trainer.callback_metrics[f"memory/{column}_bytes"] == (2 * SAVED if column == fate else 0)
        assert (column in printed) == (column == fate)


def totals_over_time(timeline, kind):
    return np.cumsum([change.num_bytes if change.kind == kind else 0 for change in timeline.changes])


@pytest.mark.parametrize("module", [Even, Checkpointed])
def test_the_third_step_is_written_down_and_peaks_as_it_was_counted(module, tmp_path):
    ledger = MemoryLedger(picture=tmp_path / "some.png")
    fit(module(), loader(5 * BATCH, BATCH), callbacks=[ledger])
    timeline = ledger.timeline
    assert (timeline.step, timeline.has_ended) == (3, True)
    for kind in ("activations", "gradients", "recomputed"):
        assert totals_over_time(timeline, kind).max() == sum(getattr(ledger.last, kind).values())
    for kind in ("activations", "recomputed"):
        assert totals_over_time(timeline, kind)[-1] == 0
    assert totals_over_time(timeline, "gradients")[-1] == whole(module())
    assert [name for name, *_ in timeline.spans()] == ["forward", "backward", "step"]
    assert is_picture(tmp_path / "some.png")


def test_what_a_checkpoint_frees_is_noticed_when_it_goes(tmp_path):
    ledger = MemoryLedger(picture=tmp_path)
    fit(Checkpointed(), loader(BATCH, BATCH), callbacks=[ledger])
    changes = [c for c in ledger.timeline.changes if c.kind == "activations" and c.module.startswith("blocks")]
    # the input of each, and in its backward pass what tanh gave, which goes before that of the next one comes
    assert [c.num_bytes for c in changes] == 6 * [SAVED] + 6 * [SAVED, -SAVED, -SAVED]
    assert [c.module for c in changes[6:]] == [f"blocks.{i}" for i in range(5, -1, -1) for _ in range(3)]


def test_a_picture_of_a_short_run_is_of_its_last_step_and_lies_beside_its_logs(tmp_path):
    ledger = MemoryLedger(picture=True)
    fit(Even(), loader(2 * BATCH, BATCH), callbacks=[ledger], default_root_dir=tmp_path)
    assert ledger.timeline.step == 2
    assert is_picture(tmp_path / "memory.png")


@pytest.mark.parametrize(("module", "has_ended"), [(FailsBackward, False), (FailsLater, True)])
def test_after_an_exception_there_is_a_picture_of_what_was_seen(module, has_ended, tmp_path):
    ledger = MemoryLedger(picture=tmp_path / "new")
    with pytest.raises(ArithmeticError):
        trainer_of(callbacks=[ledger]).fit(module(), loader(3 * BATCH, BATCH))
    assert (ledger.timeline.step, ledger.timeline.has_ended) == (1, has_ended)
    assert is_picture(tmp_path / "new" / "memory.png")


def test_where_nothing_was_seen_nothing_is_drawn(tmp_path):
    with pytest.raises(ArithmeticError):
        trainer_of(callbacks=[MemoryLedger(picture=tmp_path / "new")]).fit(Failing(), loader(BATCH, BATCH))
    assert not (tmp_path / "new").exists()


def test_a_picture_that_cannot_be_written_is_a_warning_and_none_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="MemoryLedger could not write"):
        fit(Even(), loader(BATCH, BATCH), callbacks=[MemoryLedger(picture=tmp_path / "file" / "memory.png")])
    _, ledger = ledger_of(Even())
    assert ledger.timeline is None


def test_a_block_of_code_has_a_picture_too(tmp_path):
    net = torch.nn.Linear(3, 2)
    with MemoryLedger(module=net, picture=tmp_path) as ledger:
        net(torch.ones(4, 3)).sum().backward()
    assert ledger.timeline.kept() == {"": 48}
    assert is_picture(tmp_path / "memory.png")
