"""Experts: grouped products over a loop, experts that are split over replicated ones, bytes exchanged, tokens lost.

``python benchmarks/experts.py`` runs all cases, ``python benchmarks/experts.py CASE`` one of them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import compare, fit, report, run, seconds
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor
from torch.testing import assert_close
from turns import race
from typing_extensions import override

from examples.moe import MoEGPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.experts import MoELayer
from lightning_hybrid.experts.routers import Router
from lightning_hybrid.functional.routing import Assignment

DIM, HIDDEN, TOKENS = 256, 512, 2048
NUM_RANKS, LENGTH, STEPS = 2, 64, 3


# Grouped products


def grouped(case: str, num_experts: int, target: float, rounds: int = 60) -> None:
    """Forward and backward of a layer on one process, over the same with a loop over its experts."""
    layers = {}
    for kind in ("grouped", "loop"):
        seed_everything(0, verbose=False)
        layers[kind] = MoELayer(DIM, HIDDEN, num_experts, balance_loss=0.0, implementation=kind)
    x = torch.randn(TOKENS, DIM)
    gradients = [_pass(layer, x) for layer in layers.values()]
    assert_close(*gradients, rtol=1e-4, atol=1e-5)
    rows = []
    for number in range(rounds):
        order = list(layers) if number % 2 else list(layers)[::-1]
        times = {kind: seconds(partial(_pass, layers[kind], x)) for kind in order}
        rows.append([times["grouped"], times["loop"]])
    compare(case, rows, target, ("grouped_s", "loop_s"))


def _pass(layer: MoELayer, x: Tensor) -> Tensor:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    layer(x).square().mean().backward()
    assert x.grad is not None
    return x.grad


# Experts that are split, against replicated ones


def split(case: str, width: int, num_experts: int, target: float) -> None:
    """Steps of a GPT whose experts are split over two replicas, over those where each has all of them."""
    dist.init_process_group("gloo")  # one for both: two threads cannot make one each
    strategies = {
        "split": HybridPTDPStrategy(1, expert_parallel_size=2, zero_stage=0),
        "replicated": HybridPTDPStrategy(1, zero_stage=0),
    }
    race(case, partial(mixture, width, num_experts), strategies, texts, target, num_turns=30)


def mixture(width: int = 128, num_experts: int = 8) -> MoEGPT:
    seed_everything(0, verbose=False)
    return MoEGPT(num_experts=num_experts, width=width, depth=4, heads=4, context=LENGTH)


def texts(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return list(torch.randint(256, (number, 8, LENGTH + 1), generator=generator))


# Bytes


class Choices(Callback):
    """Keeps how many pairs of the last step each layer sends to each expert."""

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.counts: list[Tensor] = []
        for layer in pl_module.modules():
            if isinstance(layer, MoELayer):
                layer.router.register_forward_hook(self.note)

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.clear()

    def note(self, router: Router, inputs: Any, assignment: Assignment) -> None:
        """Hook of a router's forward."""
        self.counts.append(torch.bincount(assignment.experts, minlength=router.num_experts))


def exchanged(case: str) -> None:
    """Bytes that each rank hands to the exchange in a step, by the ledger over what its routers have chosen."""
    ledger, choices, model = CommunicationLedger(), Choices(), mixture()
    strategy = HybridPTDPStrategy(1, expert_parallel_size=NUM_RANKS)
    dist.init_process_group("gloo")
    with redirect_stdout(io.StringIO()):  # the ledger's table
        fit(model, texts(STEPS), devices=NUM_RANKS, strategy=strategy, callbacks=[choices, ledger])
    counted = sum(traffic.payload for row, traffic in ledger.last.items() if row.axis == "expert")
    sent = torch.stack(choices.counts)  # [layers, experts]
    arriving = sent.clone()
    dist.all_reduce(arriving)
    share = sent.shape[1] // NUM_RANKS
    arriving = arriving[:, share * dist.get_rank() :][:, :share]
    rows = 2 * int(sent.sum()) + 2 * int(arriving.sum())  # there and back, and their gradients back and there
    expected = rows * model.hparams["width"] * 4 + sent.numel() * 8  # counts go first, of 8 bytes
    totals = torch.tensor([counted, expected, counted != expected])
    dist.all_reduce(totals)
    report(case, counted / expected, 1.0, bytes=int(totals[0]), by_routing=int(totals[1]), wrong_ranks=int(totals[2]))


# Imbalance


class Skewed(Router):
    """Gives the first expert ten tokens for one of each other."""

    @override
    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        numbers, cycle = torch.arange(len(x)), 9 + self.num_experts
        experts = (numbers % cycle - 9).clamp_min(0)
        probabilities = logits.softmax(-1)
        return Assignment(numbers, experts, probabilities[numbers, experts], probabilities)


class Imbalanced(LightningModule):
    """Compares what the layer gives each token with what its expert does alone."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.layer = MoELayer(DIM, HIDDEN, num_experts, Skewed(DIM, num_experts, 1), balance_loss=0.0)
        self.whole = [self.layer.experts.up.detach().clone(), self.layer.experts.down.detach().clone()]
        self.lost, self.counts = 0, torch.zeros(num_experts)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out, chosen = self.layer(batch), self.layer.router(batch)
        for expert, (up, down) in enumerate(zip(*self.whole, strict=True)):
            pairs = chosen.experts == expert
            alone = F.linear(F.gelu(F.linear(batch[pairs], up)), down) * chosen.weights[pairs, None]
            is_close = torch.isclose(out[pairs], alone, rtol=1e-3, atol=1e-5).all(1) & (alone != 0).any(1)
            self.lost += int((~is_close).sum())
            self.counts[expert] += int(pairs.sum())
        return out.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)  # the experts stay as they are


def imbalance(case: str) -> None:
    """Tokens whose expert's output does not arrive, of steps in which one expert has ten times the others' tokens."""
    seed_everything(0, verbose=False)
    model = Imbalanced()
    dist.init_process_group("gloo")
    batches = list(torch.randn(STEPS, 13 * 100, DIM))
    fit(model, batches, devices=NUM_RANKS, strategy=HybridPTDPStrategy(1, expert_parallel_size=NUM_RANKS))
    totals = torch.tensor([model.lost, int(model.counts.sum())])
    dist.all_reduce(totals)
    ratio = float(model.counts.max() / model.counts.min())
    report(case, int(totals[0]), 0, tokens=int(totals[1]), imbalance=ratio)


CASES: dict[str, tuple[int, Callable[[str], None]]] = {
    **{f"grouped_e{n}": (1, partial(grouped, num_experts=n, target=1.0)) for n in (8, 16, 32, 64)},
    "split_d2_2m": (NUM_RANKS, partial(split, width=128, num_experts=8, target=1.0)),
    "split_d2_18m": (NUM_RANKS, partial(split, width=256, num_experts=16, target=1.0)),
    "bytes_exchanged": (NUM_RANKS, exchanged),
    "imbalance_10": (NUM_RANKS, imbalance),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
