"""One budget over several callbacks: what the plan says is what the ledger counts, and every bit is the same."""

import random
import re
import warnings
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import (
    ActivationCompression,
    ActivationOffload,
    ActivationRecompute,
    MemoryLedger,
    memory_policy,
)
from lightning_hybrid.functional.mixing_plan import Mix, Ways, mix_peak_bytes
from lightning_hybrid.functional.mixing_room import cheapest_mix_with_room, units_with_room
from lightning_hybrid.functional.segments import Segment
from tests.launch import run_trainers
from tests.memory_models import Bits
from tests.small import hybrid, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
WIDTH, BATCH = 16, 64  # of so many elements the share of zeros changes little from step to step
TECHNIQUES = {
    "recompute": lambda budget: ActivationRecompute(budget_bytes=budget),
    "offload": lambda budget: ActivationOffload(budget_bytes=budget, min_bytes=0),
    "compress": lambda budget: ActivationCompression(budget_bytes=budget, min_bytes=0),
}


class Block(nn.Module):
    """Most of what it saves are rows of zeros and masks; its own argument it saves too."""

    def __init__(self):
        super().__init__()
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.shrink(F.dropout(F.relu(self.grow(x)), 0.5, self.training))


class Net(LightningModule):
    """Its head is large, and nothing recomputes it."""

    depth = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.outlet = nn.Linear(WIDTH, 2 * WIDTH)

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.outlet(x)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def samples(steps):
    return torch.randn(steps * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def fit(callbacks, module=None, strategy="auto", steps=4, **options):
    """Bits of the run, and the ledger, of whose last step the callbacks have a plan."""
    ledger, bits = MemoryLedger(), Bits()
    torch.manual_seed(2)
    trainer = trainer_of(strategy, callbacks=[*callbacks, ledger, bits], limit_val_batches=0, **options)
    trainer.fit(module or Net(), DataLoader(samples(steps), BATCH))
    return (bits.gradients, bits.weights), ledger


def callbacks_of(names, budget):
    """The first has the budget."""
    return [TECHNIQUES[name](budget if not number else None) for number, name in enumerate(names)]


def least(names, strategy="auto"):
    """The smallest budget that some techniques name when theirs is too small."""
    with pytest.raises(ValueError, match="Allow") as refusal:
        fit(callbacks_of(names, 1), strategy=strategy)
    return max(map(int, re.findall(r"Allow (\d+)", str(refusal.value))))


def peak(policy):
    units = units_with_room(policy.units.units, policy.mix)
    return mix_peak_bytes(units, policy.mix, policy.measured.in_flight)


def held(ledger):
    return ledger.last.totals()["activations"]


def test_a_mix_keeps_to_a_budget_that_none_of_its_techniques_keeps_to(capsys):
    expected, plain = fit([])
    alone = {name: least([name]) for name in TECHNIQUES}
    mixed = least(list(TECHNIQUES))
    assert mixed < min(alone.values())
    for budget in (mixed, (mixed + held(plain)) // 2, held(plain)):
        callbacks = callbacks_of(TECHNIQUES, budget)
        bits, ledger = fit(callbacks)
        policy = callbacks[0].joint
        assert bits == expected
        assert held(ledger) <= peak(policy) <= budget
        assert f"within {budget:,} bytes" in capsys.readouterr().out
    assert policy.totals["kept_bytes"] == held(ledger) == held(plain)
    assert policy.totals["extra_seconds"] == 0


@pytest.mark.parametrize(
    "names", [("recompute", "offload"), ("compress", "recompute"), ("compress", "offload"), ("compress",)], ids="+".join
)
def test_pairs_and_compression_alone_keep_to_their_budgets(names):
    expected, plain = fit([])
    smallest = least(names)
    for budget in (smallest, (2 * smallest + held(plain)) // 3):
        callbacks = callbacks_of(names, budget)
        bits, ledger = fit(callbacks)
        assert bits == expected
        assert held(ledger) <= peak(callbacks[0].joint) <= budget < held(plain)


def plan_with_twice_the_budget(units, budget_bytes, *others):
    return cheapest_mix_with_room(units, 2 * budget_bytes, *others)


def on_two_ranks():
    """By strategy, what a test needs to know of this rank."""
    found = {}
    for name, strategy in {"ddp": lambda: "ddp", "pipeline": lambda: hybrid(2, microbatches=4)}.items():
        expected, _ = fit([], strategy=strategy(), steps=6)
        mixed = least(list(TECHNIQUES), strategy())
        callbacks = callbacks_of(TECHNIQUES, mixed)
        with pytest.MonkeyPatch.context() as patch:
            if name == "ddp" and dist.get_rank():  # a replica that would make another plan
                patch.setattr(memory_policy, "cheapest_mix_with_room", plan_with_twice_the_budget)
            bits, ledger = fit(callbacks, strategy=strategy(), steps=6)
        policy = callbacks[0].joint
        segments = [policy.units.names[s.start : s.stop] for s in policy.mix.segments if s.recomputed]
        sizes = [held(ledger), peak(policy), mixed]
        found[name] = {"same": bits == expected, "sizes": sizes, "segments": segments, "policy": policy.measured}
    return found


def test_replicas_and_stages_keep_to_budgets_and_replicas_recompute_alike():
    first, second = run_trainers(2, on_two_ranks)
    for found in (*first.values(), *second.values()):
        assert found["same"]
        assert found["sizes"] == sorted(found["sizes"])
    assert first["ddp"]["segments"] == second["ddp"]["segments"]
    assert first["ddp"]["policy"] == second["ddp"]["policy"]
    assert [of_rank["pipeline"]["policy"].in_flight for of_rank in (first, second)] == [2, 1]
    assert not first["pipeline"]["policy"].blocks & second["pipeline"]["policy"].blocks


class Holding(Net):
    """The step holds what the first block has got and given until its end, so that neither is encoded in time."""

    def training_step(self, batch, batch_idx):
        held = [F.relu(self.inlet(batch))]
        for block in self.blocks:
            held.append(F.relu(block(held[-1])))
        return torch.tanh(self.outlet(held[-1])).square().mean()


class Shared(Net):
    """All blocks get a second argument, and a result of the first block is saved behind the third."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(self.depth))

    def training_step(self, batch, batch_idx):
        x, bias, first = self.inlet(batch), torch.sigmoid(batch), None
        for number, block in enumerate(self.blocks):
            x = block(x, bias)
            first = x if first is None else first
            x = x * torch.tanh(first) if number == 3 else x
        return torch.tanh(self.outlet(x)).square().mean()


class Adding(Block):
    def forward(self, x, bias):
        return F.relu(super().forward(x * bias))


class Alternating(Net):
    """Two lists, whose blocks run in turns."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList(Block() for _ in range(self.depth))

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch)
        for block, other in zip(self.blocks, self.others, strict=True):
            x = other(block(x))
        return torch.tanh(self.outlet(x)).square().mean()


class Repeating(Net):
    """One block is called again and again."""

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch)
        for _ in range(3):
            x = self.blocks[1](self.blocks[0](x))
        return torch.tanh(self.outlet(x)).square().mean()


class Normed(Net):
    """Large statistics, of which a repetition saves copies, and a head that saves little."""

    def __init__(self):
        super().__init__()
        norms = (nn.BatchNorm1d(WIDTH, affine=False) for _ in range(self.depth))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for norm in norms)

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_copies_of_statistics_that_a_repetition_saves_are_counted():
    names = ["recompute", "offload"]
    with pytest.raises(ValueError, match="Allow") as refusal:
        fit(callbacks_of(names, 1), Normed())
    smallest = int(re.search(r"Allow (\d+)", str(refusal.value))[1])
    bits, ledger = fit(callbacks_of(names, smallest), Normed(), steps=3)
    assert bits == plain_bits(Normed)
    assert held(ledger) <= smallest
    recompute = ActivationRecompute(budget_bytes=10**6)
    fit([recompute], Normed())
    copies, saved = 2 * WIDTH * 4 + 8, BATCH * WIDTH * 4 + 2 * WIDTH * 4  # and a counter; what norms read and find
    assert {cost.internal for cost in recompute.costs.values()} == {copies + saved}


def a_mix(units, choose):
    """A plan by what is chosen of each place in it: whether a block is recomputed, and the way of a tensor."""
    segments = tuple(Segment(i, i + 1, unit.seconds is not None and choose(i, None)) for i, unit in enumerate(units))
    ways = []
    for segment, unit in zip(segments, units, strict=True):
        found = {
            part: tuple(choose(segment.start, saved) for saved in getattr(unit, part))
            for part in ("arguments", "internal", "after")
        }
        found["internal"] = tuple("dropped" if segment.recomputed else way for way in found["internal"])
        is_stored = [segment.recomputed or is_saved for is_saved in unit.is_saved]
        pairs = zip(found["arguments"], is_stored, strict=True)
        found["arguments"] = tuple(way if stored else "dropped" for way, stored in pairs)
        ways.append(Ways(**found))
    return Mix(segments, tuple(ways))


@cache
def plain_bits(model):
    return fit([], model(), steps=3)[0]


def follow(choose, monkeypatch, model=Net):
    """What the ledger counts under a plan that is not searched for, and what the plan says of it."""
    monkeypatch.setattr(memory_policy, "cheapest_mix_with_room", lambda units, *_: a_mix(units, choose))
    callbacks = callbacks_of(TECHNIQUES, 10**9)
    bits, ledger = fit(callbacks, model(), steps=3)
    assert bits == plain_bits(model)
    return held(ledger), peak(callbacks[0].joint)


def test_a_unit_in_backward_brings_back_what_the_one_before_has_moved_and_nothing_behind_it(monkeypatch):
    def choose(index, saved):
        if saved is None:
            return 2 <= index < Net.depth
        return "offloaded" if index in (1, Net.depth) and saved.offload_seconds is not None else "kept"

    counted, planned = follow(choose, monkeypatch)
    assert counted <= planned


class Skipping(Net):
    """What the first blocks give is saved behind them, and again by the last blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([*(Block() for _ in range(3)), *(Scaled() for _ in range(3))])

    def training_step(self, batch, batch_idx):
        x, skips = self.inlet(batch), []
        for block in self.blocks[:3]:
            x = F.relu(block(x))
            skips.append(x)
        for block in self.blocks[3:]:
            x = block(x, skips.pop())
        return torch.tanh(self.outlet(x)).square().mean()


class Scaled(Block):
    def forward(self, x, skip):
        return super().forward(x * skip)


def test_what_several_units_use_is_there_in_each_of_them_wherever_it_lies_between(monkeypatch):
    def choose(index, saved):
        if saved is None:
            return index == 5
        return "offloaded" if saved.offload_seconds is not None else "kept"

    counted, planned = follow(choose, monkeypatch, Skipping)
    assert counted <= planned


@pytest.mark.parametrize("seed", range(2))
def test_any_plan_holds_no_more_than_it_says(seed, monkeypatch):
    draw = random.Random(seed)

    def choose(index, saved):
        if saved is None:
            return draw.random() < 0.5
        ways = ["kept"] + ["compressed"] * (saved.compressed_bytes is not None)
        return draw.choice(ways + ["offloaded"] * (saved.offload_seconds is not None))

    counted, planned = follow(choose, monkeypatch, (Skipping, Shared)[seed % 2])
    assert counted <= planned


ALL = list(TECHNIQUES)


@pytest.mark.parametrize(
    ("model", "names"),
    [(Holding, ["compress", "offload"]), (Shared, ALL), (Shared, ALL[1:]), (Alternating, ALL), (Repeating, ALL)],
)
def test_a_plan_covers_what_the_ledger_counts_however_blocks_are_called(model, names):
    expected, plain = fit([], model())
    with pytest.raises(ValueError, match="Allow") as refusal:
        fit(callbacks_of(names, 1), model())
    smallest = int(re.search(r"Allow (\d+)", str(refusal.value))[1])
    for budget in (smallest + smallest // 16, (smallest + held(plain)) // 2):
        callbacks = callbacks_of(names, budget)
        bits, ledger = fit(callbacks, model())
        assert bits == expected
        assert held(ledger) <= peak(callbacks[0].joint) <= budget


def test_lossy_codes_and_what_hooks_log():
    logged = []

    class Logger(MemoryLedger):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            logged.append({k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("memory_policy/")})

    budget = 192_000
    callbacks = [ActivationCompression(lossy="fp8", budget_bytes=budget, min_bytes=0), ActivationRecompute()]
    ledger = Logger()
    trainer = trainer_of(callbacks=[*callbacks, ledger], limit_val_batches=0, log_every_n_steps=1)
    trainer.fit(Net(), DataLoader(samples(4), BATCH))
    policy = callbacks[0].joint
    assert policy is callbacks[1].joint
    assert policy.totals["compressed_bytes"] < policy.totals["uncompressed_bytes"] // 3
    assert held(ledger) <= peak(policy) <= budget
    assert logged[0] == {}
    assert logged[-1] == {f"memory_policy/{name}": pytest.approx(value) for name, value in policy.totals.items()}
    rows = [cell for column in policy.table().columns for cell in column.cells]
    assert {"blocks.0", "all", f"{policy.totals['kept_bytes']:,}"} <= set(rows)


class Filling(Net):
    """Its activations lose their zeros when the plan has been made."""

    def training_step(self, batch, batch_idx):
        x = F.relu(self.inlet(batch) - 1 + batch_idx)
        for block in self.blocks:
            x = F.relu(block(x).abs() + x) if batch_idx > 1 else F.relu(block(x) - 1)
        return x.square().mean()


class Growing(Net):
    """Its batches do."""

    def training_step(self, batch, batch_idx):
        return super().training_step(torch.cat([batch] * (1 + batch_idx)), batch_idx)


@pytest.mark.parametrize(("model", "names"), [(Filling, ["compress"]), (Growing, ["recompute", "compress"])])
def test_what_outgrows_the_plan_is_told_once_with_the_way_out(model, names):
    with pytest.raises(ValueError, match="Allow") as refusal:
        fit(callbacks_of(names, 1), model())
    smallest = int(re.search(r"Allow (\d+)", str(refusal.value))[1])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(callbacks_of(names, smallest), model())
    told = [str(warning.message) for warning in found if "of a micro-batch" in str(warning.message)]
    assert len(told) == 1
    assert re.search(rf"Rank 0 holds .* budget_bytes={smallest} counts on .* Allow [\d,]+ bytes more", told[0])


def test_what_does_not_go_together_is_refused_before_training():
    offload, compress = ActivationOffload(budget_bytes=5), ActivationCompression(budget_bytes=6)
    wrong = {
        "ActivationOffload(budget_bytes=5) and ActivationCompression(budget_bytes=6): ": [offload, compress],
        "budget_bytes=5 with ActivationRecompute(policy='sqrt'): ": [ActivationRecompute("sqrt"), offload],
        "ActivationRecompute(blocks=None) and ActivationOffload(blocks=['blocks']): ": [
            ActivationRecompute(),
            ActivationOffload(budget_bytes=5, blocks=["blocks"]),
        ],
    }
    for message, callbacks in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            fit(callbacks)
    dealt = ActivationRecompute(partition_over_tensor_axis=True)
    trainer = SimpleNamespace(strategy=hybrid(1, tensor_parallel_size=2), callbacks=[dealt, compress])
    with pytest.raises(ValueError, match=r"budget_bytes=6 with ActivationRecompute\(partition_over_tensor_axis=True\)"):
        dealt.setup(trainer, Net(), "fit")
    with pytest.raises(ValueError, match=re.escape("budget_bytes=0 must be a whole number of bytes of at least 1.")):
        ActivationCompression(budget_bytes=0)
