"""One budget over several callbacks: what the plan says is what the ledger counts, and every bit is the same."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import ActivationCompression, ActivationOffload, ActivationRecompute, MemoryLedger
from lightning_hybrid.functional.mixing_codes import units_with_codes
from lightning_hybrid.functional.mixing_plan import mix_peak_bytes
from tests.launch import run_trainers
from tests.memory_models import Bits
from tests.small import hybrid, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
WIDTH, BATCH = 16, 8
ROW = BATCH * WIDTH * 4  # bytes of what most layers get or give
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
    units = units_with_codes(policy.units.units, policy.mix)
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


@pytest.mark.parametrize("names", [("recompute", "offload"), ("compress", "recompute"), ("compress", "offload")])
def test_pairs_and_compression_alone_keep_to_their_budgets(names):
    expected, plain = fit([])
    for chosen in (names, names[:1] if names[1] == "offload" and names[0] == "compress" else names):
        smallest = least(chosen)
        for budget in (smallest, (2 * smallest + held(plain)) // 3):
            callbacks = callbacks_of(chosen, budget)
            bits, ledger = fit(callbacks)
            assert bits == expected
            assert held(ledger) <= peak(callbacks[0].joint) <= budget < held(plain)
