"""What blocks keep, by policy; tests/test_memory_parity.py shows that every bit is the same."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import ActivationOffload, ActivationRecompute, MemoryLedger
from lightning_hybrid.functional.recomputation import smallest_budget
from lightning_hybrid.functional.segments import Segment, peak_bytes
from tests.launch import run_trainers
from tests.small import hybrid, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
WIDTH, BATCH = 16, 8
ROW = BATCH * WIDTH * 4  # bytes of what a layer gets or gives


class Early(nn.Module):
    """Before its activation: no operation saves the block's own input."""

    def __init__(self):
        super().__init__()
        self.grow, self.shrink = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.shrink(torch.relu(self.grow(torch.relu(x))))


class Net(LightningModule):
    depth = 9

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Early() for _ in range(self.depth))
        self.calls = 0

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Trained(Net):
    """A linear layer on the tensor axis in each block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(12)
        )


def batches(number=4):
    torch.manual_seed(1)
    return DataLoader(list(torch.randn(number, BATCH, WIDTH)), batch_size=None)


def fit(callback, module=None, strategy="auto", **options):
    """The callback, and the memory of the last step."""
    ledger, module = MemoryLedger(), module or Net()
    trainer = trainer_of(strategy, callbacks=[callback, ledger], **{"limit_val_batches": 0, **options})
    trainer.fit(module, batches(), batches(1))
    assert all("forward" not in vars(block) for block in module.blocks)
    return callback, ledger.last


def in_blocks(of_module):
    return sum(number for name, number in of_module.items() if name.startswith("blocks."))


def test_every_block_keeps_its_argument_and_the_ledger_says_what_is_made_again():
    _, memory = fit(ActivationRecompute())
    # blocks' arguments are saved under their names; in backward one block is there besides
    assert in_blocks(memory.activations) == 9 * ROW + 2 * ROW
    assert in_blocks(memory.recomputed) == 9 * 2 * ROW


@pytest.mark.parametrize("depth", [4, 9, 16])
def test_square_root_segments_keep_the_bytes_of_the_formula(depth, capsys):
    class Deep(Net):
        pass

    Deep.depth = depth
    callback, memory = fit(ActivationRecompute("sqrt"), Deep())
    formula = min(k * ROW + -(-depth // k) * 2 * ROW for k in range(1, depth + 1))
    assert peak_bytes(list(callback.costs.values()), callback.plan) == formula
    assert in_blocks(memory.activations) == formula
    assert "Recomputed segments" in capsys.readouterr().out


def test_a_budget_is_kept_to_by_a_plan_that_is_shown(capsys):
    costs = list(fit(ActivationRecompute("sqrt"))[0].costs.values())
    least, everything = smallest_budget(costs), 9 * 2 * ROW
    peaks = []
    for budget in (least, (least + everything) // 2, everything):
        callback, memory = fit(ActivationRecompute(budget_bytes=budget))
        assert peak_bytes(costs, callback.plan) == in_blocks(memory.activations) <= budget
        peaks.append(in_blocks(memory.activations))
        assert all(cost.seconds > 0 for cost in callback.costs.values())
        assert f"Recomputed within {budget:,} bytes" in capsys.readouterr().out
    assert peaks[0] == least
    assert callback.plan == [Segment(i, i + 1, False) for i in range(9)]
    with pytest.raises(ValueError, match=rf"budget_bytes={least - 1}: .* take at least {least} bytes"):
        fit(ActivationRecompute(budget_bytes=least - 1))


class Biased(Early):
    """Adds what all blocks get: a tensor that no operation saves."""

    def forward(self, x, bias):
        return super().forward(x) + bias.sum(0)


class Sharing(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(self.depth))

    def training_step(self, batch, batch_idx):
        x, bias = self.inlet(batch), torch.rand(20, BATCH, WIDTH)
        for block in self.blocks:
            x = block(x, bias)
        return x.square().mean()


def test_what_all_blocks_get_is_in_the_budget_whichever_are_recomputed():
    with pytest.raises(ValueError, match="take at least") as refusal:
        fit(ActivationRecompute(budget_bytes=1), Sharing())
    least = int(re.search(r"Allow (\d+)", str(refusal.value))[1])
    for budget in (least, least + 4 * ROW):
        callback, memory = fit(ActivationRecompute(budget_bytes=budget), Sharing())
        assert any(segment.recomputed for segment in callback.plan)
        assert 20 * ROW < in_blocks(memory.activations) <= budget


def test_selective_recomputation_keeps_products():
    _, everything = fit(ActivationRecompute("selective"))
    # of each block its argument and both products; in backward the two activations of one block besides
    assert in_blocks(everything.activations) == 9 * 3 * ROW + 2 * ROW
    _, nothing = fit(ActivationRecompute("selective", keep=["aten.bmm"]))
    assert in_blocks(nothing.activations) == 9 * ROW + 2 * ROW


def test_validation_keeps_nothing_and_a_second_fit_begins_anew():
    module, callback = Net(), ActivationRecompute("sqrt")
    trainer = trainer_of(callbacks=[callback])
    for _ in range(2):
        trainer.fit(module, batches(), batches(1))
        trainer.fit_loop.max_epochs += 1
    assert len(callback.plan) > 1
    assert all("forward" not in vars(block) for block in module.blocks)


class Bare(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def test_what_cannot_work_is_refused_before_training():
    wrong = {
        "policy='half' is none of ('full', 'sqrt', 'selective').": {"policy": "half"},
        "budget_bytes=5 with policy='full': ": {"policy": "full", "budget_bytes": 5},
        "budget_bytes=0 must be a whole number of bytes of at least 1.": {"budget_bytes": 0},
        "budget_bytes='8GiB' must be a whole number of bytes of at least 1.": {"budget_bytes": "8GiB"},
        "budget_bytes=8000000.0 must be a whole number of bytes of at least 1.": {"budget_bytes": 8e6},
        "budget_bytes=True must be a whole number of bytes of at least 1.": {"budget_bytes": True},
        "keep=['aten.mm'] says what policy='selective' keeps, and policy is None.": {"keep": ["aten.mm"]},
        "keep=['aten.nix']: torch has no operation 'aten.nix'.": {"policy": "selective", "keep": ["aten.nix"]},
        "keep=['aten.nox']: torch has no operation 'aten.nox'.": {"policy": "selective", "keep": "aten.nox"},
        "torch has no operation <built-in method mm": {"policy": "selective", "keep": [torch.mm]},
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            ActivationRecompute(**options)
    with pytest.raises(ValueError, match="found no list of blocks in Bare"):
        trainer_of(callbacks=[ActivationRecompute()]).fit(Bare(), batches())
    with pytest.raises(ValueError, match="has 2 ActivationRecomputes"):
        trainer_of(callbacks=[ActivationRecompute(), ActivationRecompute("sqrt")]).fit(Net(), batches())
    with pytest.raises(ValueError, match="blocks='layers' does not exist in the model"):
        trainer_of(callbacks=[ActivationRecompute(blocks="layers")]).fit(Net(), batches())
    both = [ActivationRecompute(partition_over_tensor_axis=True), ActivationOffload()]
    with pytest.raises(ValueError, match="together the device would hold more"):
        trainer_of(callbacks=both).fit(Net(), batches())
    callback = ActivationRecompute()
    with pytest.raises(ValueError, match="cannot run blocks again under FSDPStrategy"):
        callback.setup(SimpleNamespace(strategy=FSDPStrategy(), callbacks=[callback]), Net(), "fit")
    with pytest.raises(ValueError, match="deals arguments out over a tensor axis, of which SingleDeviceStrategy"):
        trainer_of(callbacks=[ActivationRecompute(partition_over_tensor_axis=True)]).fit(Net(), batches())


class Watch(MemoryLedger):
    """Also looks at the slots of a partition after each step."""

    def __init__(self, callback):
        super().__init__()
        self.callback, self.slots = callback, []

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        if self.callback._partition is not None:
            self.slots.append([slot for slots in self.callback._partition.buffers._free.values() for slot in slots])


def partitioned():
    """(kept bytes; bytes of slots and pieces of memory after each step) without and with."""
    found = []
    for partition in (False, True):
        ledger = Watch(ActivationRecompute(partition_over_tensor_axis=partition))
        strategy = hybrid(1, microbatches=1, tensor_parallel_size=2)
        options = {"callbacks": [ledger.callback, ledger], "limit_val_batches": 0}
        trainer_of(strategy, **options).fit(Trained(), batches())
        pieces = [len({slot.untyped_storage().data_ptr() for slot in slots}) for slots in ledger.slots]
        found.append(
            (ledger.last.totals()["activations"], [sum(s.nbytes for s in slots) for slots in ledger.slots], pieces)
        )
    callback = ActivationRecompute(partition_over_tensor_axis=True)
    with pytest.raises(ValueError, match="of which HybridPTDPStrategy has none here"):
        trainer_of(hybrid(2), callbacks=[callback]).fit(Trained(), batches())
    return found


class Skipping(Net):
    """Rank 1 leaves a block out in the first step."""

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch)
        for number, block in enumerate(self.blocks):
            if (batch_idx, number, dist.get_rank()) != (0, 4, 1):
                x = block(x)
        return x.square().mean()


class Lists(Net):
    """A pipeline puts one list on each rank."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList(Early() for _ in range(self.depth))

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch)
        for block in [*self.blocks, *self.others]:
            x = block(x)
        return x.square().mean()


def plans():
    """Of replicas that call different blocks; of a pipeline, one rank of which has none of the blocks."""
    skipping, lists = ActivationRecompute("sqrt"), ActivationRecompute("sqrt", blocks="blocks")
    fit(skipping, Skipping(), "ddp_find_unused_parameters_true")
    fit(lists, Lists(), hybrid(2, microbatches=2))
    return skipping.plan, lists.plan


def on_two_ranks():
    return partitioned(), plans()


@pytest.fixture(scope="module")
def two_ranks():
    return run_trainers(2, on_two_ranks)


def test_ranks_make_the_same_plan_and_need_no_block(two_ranks):
    (skipping, first), (same, second) = (plans for _, plans in two_ranks)
    assert skipping == same
    assert skipping[-1].stop == 9
    assert first[-1].stop == 9
    assert second == []


def test_arguments_are_dealt_out_over_the_tensor_axis_in_one_piece_of_memory(two_ranks):
    for ((plain, none, _), (shared, slots, pieces)), _ in two_ranks:
        assert none == []
        assert slots == [12 * ROW // 2] * 4  # half of each block's argument
        assert pieces == [1] * 4
        assert plain - 12 * ROW // 2 <= shared <= plain - 12 * ROW // 2 + 2 * ROW
        # one is gathered at a time, and the tensor axis remembers the one that entered last
