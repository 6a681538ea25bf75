"""What the monitor logs is what a count by hand of each router's choices says, in every layout."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid.callbacks import CommunicationLedger, ExpertMonitor
from lightning_hybrid.experts.layer import MoELayer
from lightning_hybrid.experts.routers import TopK
from lightning_hybrid.functional.loads import Routed
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader

NUM_EXPERTS, LENGTH, CAPACITY, BATCH, BATCHES = 4, 4, 3, 4, 5
FACTOR = CAPACITY * NUM_EXPERTS / (2 * LENGTH)  # of two pairs a token


class Mixture(nn.Module):
    """In each sequence, an expert takes three of the eight pairs."""

    def __init__(self):
        super().__init__()
        router = TopK(WIDTH, NUM_EXPERTS, 2, groups="sequence")
        self.mixture = MoELayer(WIDTH, 5, NUM_EXPERTS, router, capacity_factor=FACTOR, balance_loss=0.0)

    def forward(self, x):
        return x + self.mixture(x)


class Recomputed(Mixture):
    reentrant = False

    def forward(self, x):
        forward = super().forward
        return checkpoint(forward, x, use_reentrant=self.reentrant) if self.training else forward(x)


class Reentrant(Recomputed):
    reentrant = True


class Mixtures(Small):
    block, depth, rate = Mixture, 2, 0.2


class Validated(Mixtures):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)


class RecomputedMixtures(Validated):
    block = Recomputed


class ReentrantMixtures(Validated):
    block = Reentrant


class ByHand(Mixtures):
    """Keeps what its routers decide."""

    def __init__(self):
        super().__init__()
        self.decided = [[] for _ in self.blocks]
        for decided, block in zip(self.decided, self.blocks, strict=True):
            block.mixture.router.register_forward_hook(partial(_keep, decided))


def _keep(decided, router, inputs, assignment):
    decided.append(assignment)


class Stopping(Mixtures):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("enough")
        return super().training_step(batch, batch_idx)


def batches(data=1, number=BATCHES):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number * BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    samples = TensorDataset(x, x.sum(2, keepdim=True).sin())
    rank = torch.distributed.get_rank() % data if data > 1 else 0
    return DataLoader(samples, BATCH // data, sampler=DistributedSampler(samples, data, rank, shuffle=False))


def routed(assignments):
    """The literal count, pair by pair."""
    counts, dropped, entropy = [0] * NUM_EXPERTS, [0] * NUM_EXPERTS, 0.0
    for assignment in assignments:
        taken = {}
        for token, expert in zip(assignment.tokens.tolist(), assignment.experts.tolist(), strict=True):
            queue = (token // LENGTH, expert)
            taken[queue] = taken.get(queue, 0) + 1
            counts[expert] += 1
            dropped[expert] += taken[queue] > CAPACITY
        entropy -= sum(p * math.log(p) for row in assignment.probabilities.tolist() for p in row)
    tokens = len(assignments) * BATCH * LENGTH
    return Routed(tuple(counts), tuple(dropped), tokens, pytest.approx(entropy, rel=1e-9))


def by_hand(bounds):
    """Of the batches between each two bounds, what each layer routed; from a fit in one process."""
    module = ByHand()
    fit(module, batches())
    layers = {f"blocks.{number}.mixture": decided for number, decided in enumerate(module.decided)}
    return [{name: routed(decided[first:last]) for name, decided in layers.items()} for first, last in pairwise(bounds)]


def monitored(module, strategy="auto", data=1, **options):
    """Windows of a fit with validation, and what was logged last."""
    monitor = ExpertMonitor(every_n_steps=2, picture=False)
    trainer = fit(module, batches(data), strategy, batches(data, 1), callbacks=[monitor], **options)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("experts/")}
    return monitor.history.windows, logged


def check(found, expected, steps):
    windows, logged = found
    assert [step for step, _ in windows] == steps
    assert [layers for _, layers in windows] == expected
    last = expected[-2]  # the rest of a run is not logged
    for name, of_layer in last.items():
        pairs = sum(of_layer.counts)
        wanted = {f"load/{number}": count / pairs for number, count in enumerate(of_layer.counts)}
        wanted["imbalance"] = max(of_layer.counts) / pairs * NUM_EXPERTS
        wanted["dropped"] = sum(of_layer.dropped) / pairs
        wanted["entropy"] = of_layer.entropy.expected / of_layer.num_tokens
        assert {key: logged.pop(f"experts/{name}/{key}") for key in wanted} == pytest.approx(wanted, rel=1e-9)
    assert not logged


@pytest.mark.parametrize("model", [Validated, RecomputedMixtures, ReentrantMixtures])
def test_one_process_counts_each_training_pass_once(model):
    expected = by_hand([0, 2, 4, 5])
    assert all(0 < sum(routed.dropped) < sum(routed.counts) / 2 for window in expected for routed in window.values())
    check(monitored(model()), expected, [2, 4, 5])


LAYOUTS = {  # size of the data axis, and the strategy
    "ddp": (2, "ddp"),
    "data": (2, {"pipeline": 1, "microbatches": 1}),
    "expert": (2, {"pipeline": 1, "microbatches": 1, "expert_parallel_size": 2, "zero_stage": 3}),
    "pipeline": (1, {"pipeline": 2}),
    "tensor": (1, {"pipeline": 1, "microbatches": 1, "tensor_parallel_size": 2}),
}


def sent():
    """What the last step routed, and what travelled on the axis of the experts."""
    ledger, monitor = CommunicationLedger(), ExpertMonitor(1, picture=False)
    strategy = hybrid(1, 1, 1, expert_parallel_size=2)
    fit(Mixtures(), batches(2), strategy, callbacks=[ledger, monitor])
    payloads = {}
    for row, traffic in ledger.world.items():
        if row.axis == "expert":
            payloads[row.phase, row.dtype] = payloads.get((row.phase, row.dtype), 0) + traffic.payload
    return monitor.last, payloads


def over_two():
    outcomes = {}
    for name, (data, strategy) in LAYOUTS.items():
        strategy = strategy if isinstance(strategy, str) else hybrid(**strategy)
        model = RecomputedMixtures if name in ("expert", "pipeline") else Validated
        outcomes[name] = monitored(model(), strategy, data)
    outcomes["bytes"] = sent()
    outcomes["accumulated"] = monitored(Validated(), hybrid(2), accumulate_grad_batches=2)
    return outcomes


@pytest.mark.filterwarnings("ignore:tensor_parallel_size=2 splits nothing")
def test_all_ranks_of_every_layout_count_what_one_process_does():
    expected = by_hand([0, 2, 4, 5])
    first, second = run_trainers(2, over_two)
    assert first == second
    for name in LAYOUTS:
        windows, logged = first[name]
        if name == "tensor":  # both ranks count all tokens, which shares do not show
            windows = [(step, {key: halved(value) for key, value in layers.items()}) for step, layers in windows]
        check((windows, logged), expected, [2, 4, 5])
    layers, payloads = first["bytes"]
    kept = sum(routed.num_pairs - sum(routed.dropped) for routed in layers.values())
    there_and_back, counts = 2 * kept * WIDTH * 8, 2 * len(layers) * NUM_EXPERTS * 8
    assert payloads == {
        ("forward", "int64"): counts,
        ("forward", "float64"): there_and_back,
        ("backward", "float64"): there_and_back,
    }
    windows, _ = first["accumulated"]
    assert [step for step, _ in windows] == [2, 3]
    assert [sum(routed.num_tokens for routed in layers.values()) for _, layers in windows] == [
        2 * number * BATCH * LENGTH for number in (4, 1)
    ]


def halved(routed):
    counts, dropped = ([number // 2 for number in numbers] for numbers in (routed.counts, routed.dropped))
    return Routed(tuple(counts), tuple(dropped), routed.num_tokens // 2, routed.entropy / 2)


def is_picture(path):
    return Path(path).read_bytes().startswith(b"\x89PNG")


def test_picture_lies_beside_the_logs_of_its_run(tmp_path):
    logger = CSVLogger(tmp_path, name="log", version="")
    fit(Mixtures(), batches(), callbacks=[ExpertMonitor()], logger=logger, log_every_n_steps=2)
    assert is_picture(tmp_path / "log" / "experts.png")
    header = (tmp_path / "log" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"experts/blocks.1.mixture/load/3", "experts/blocks.0.mixture/dropped"} <= set(header)


def test_a_run_that_fails_is_drawn_as_far_as_it_was_read_and_counts_no_more(tmp_path):
    monitor, module = ExpertMonitor(1, tmp_path / "new" / "loads.png", each_expert=False), Stopping()
    with pytest.raises(RuntimeError, match="enough"):
        fit(module, batches(), callbacks=[monitor])
    assert is_picture(tmp_path / "new" / "loads.png")
    assert [step for step, _ in monitor.history.windows] == [1, 2, 3]
    total = monitor.history.total()
    module.blocks[0].mixture.train()(torch.randn(2, LENGTH, WIDTH, dtype=torch.float64))
    assert monitor.history.total() == total
    assert not module.blocks[0].mixture.statistics._followers


class StoppingOne(Mixtures):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3 and torch.distributed.get_rank() == 1:
            raise RuntimeError("enough")


def stopped_by_one(folder):
    fit(StoppingOne(), batches(2), hybrid(1, 1, 1, expert_parallel_size=2), callbacks=[ExpertMonitor(1, folder)])


def test_a_run_of_which_one_rank_fails_is_drawn_too(tmp_path):
    with pytest.raises(RuntimeError, match="enough"):
        run_trainers(2, stopped_by_one, tmp_path)
    assert is_picture(tmp_path / "experts.png")


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="could not write"):
        fit(Mixtures(), batches(), callbacks=[ExpertMonitor(picture=tmp_path / "file" / "loads.png")])


def test_the_users_own_reset_and_a_second_monitor_change_nothing():
    class Resetting(Mixtures):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            for block in self.blocks:
                assert block.mixture.statistics.num_passes == 1
                block.mixture.statistics.reset()

    monitors = [ExpertMonitor(steps, picture=False) for steps in (1, 3)]
    fit(Resetting(), batches(), callbacks=monitors)
    assert [step for step, _ in monitors[0].history.windows] == [1, 2, 3, 4, 5]
    assert [step for step, _ in monitors[1].history.windows] == [3, 5]
    one, other = (monitor.history.total() for monitor in monitors)
    assert {name: routed.counts for name, routed in one.items()} == {n: routed.counts for n, routed in other.items()}


def test_a_model_without_experts_is_refused_before_training():
    with pytest.raises(ValueError, match=r"nothing to watch: no module of Small has `statistics`"):
        fit(Small(), loader(8, 4), callbacks=[ExpertMonitor()])
    with pytest.raises(ValueError, match="every_n_steps=0"):
        ExpertMonitor(0)
