"""ZeRO stages 1 to 3, copies of shards and offload: the numbers of one process, and what it is easy to get wrong."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.parallel.gradients import local
from tests.launch import run_trainers
from tests.small import WIDTH, Block, Small, fit, hybrid, loader, samples, trainer_of, weights

BATCHES, BATCH = 6, 8
STAGES = [1, 2, 3]


class Model(Small):
    """Two groups, one without decay; AdamW moves what has a gradient of zero, and leaves alone what has none."""

    epochs = 1

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, self.rate, eps=1e-3)


class Odd(Model):
    """Sizes that no number of ranks divides, a scalar, a transposed matrix, parameters of no use and of no size."""

    def __init__(self):
        super().__init__()
        self.outlet = nn.Linear(WIDTH, 5).double()
        self.narrow = nn.Linear(5, 1).double()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.float64).t())
        self.unused = nn.Linear(WIDTH, WIDTH).double()
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x):
        return self.narrow(
            super().forward(x * self.scale + (x @ self.turned).sum(1, keepdim=True) + self.nothing.sum())
        )


class Functional(Model):
    """Reads weights past the calls of their modules: before them, after them, and of a block's child."""

    def forward(self, x):
        x = F.linear(x, self.inlet.weight) + self.blocks[0].linear(x)
        x = super().forward(x)
        return x + 0.01 * sum(p.square().sum() for p in self.blocks[3].parameters())


class Frozen(Model):
    """Everything but the last two blocks is frozen, and thawed in the second epoch."""

    def __init__(self):
        super().__init__()
        self.set(False)

    def set(self, trained):
        for name, parameter in self.named_parameters():
            if not name.startswith(("blocks.4", "blocks.5")):
                parameter.requires_grad_(trained)

    epochs = 2

    def on_train_epoch_start(self):
        self.set(self.current_epoch > 0)


class Views(Model):
    """What a block returns is a view, which the model then writes to."""

    class block(Block):
        def forward(self, x):
            return super().forward(x).view(x.shape)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            before, x = x, block(x)
            x += 0.1 * before
        return self.outlet(x)


class Choosy(Model):
    """One replica's samples use a parameter that the other's do not."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(WIDTH, 1).double()
        self.never = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def loss(self, batch):
        x, y = batch
        late = y.mean() > samples(BATCHES * BATCH)[:][1].mean()
        return F.mse_loss(self(x) + (self.sometimes(x) if late else 0), y)


class Sharing(Model):
    """All blocks have one module in common."""

    class block(Block):
        def __init__(self):
            super().__init__()
            self.shared = None

        def forward(self, x):
            return super().forward(x) + self.shared(x)

    def __init__(self):
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH).double()
        for block in self.blocks:
            block.shared = shared


class Late(Sharing):
    """Modules and parameters in containers that nobody calls, and that are used after the first step only."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)}).double()
        self.list = nn.ParameterList([torch.full((WIDTH, WIDTH), 0.1, dtype=torch.float64)])

    def forward(self, x):
        if self.global_step:
            x = x + self.heads["a"](x) @ self.list[0]
        return super().forward(x)


MODELS = {"late": Late, "sharing": Sharing, "odd": Odd, "functional": Functional, "frozen": Frozen, "views": Views}
NORMS = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}


class Same(Callback):
    """What a replica has: hashes of all values after each step, and of the parameters that its modules compute with."""

    def __init__(self):
        self.sums, self.used = [], []

    def on_train_start(self, trainer, pl_module):
        for module in pl_module.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(self.note)

    def note(self, module, args):
        whole = [p for p in module.parameters(recurse=False) if not isinstance(p, DTensor)]
        self.used.append([torch.hash_tensor(p.detach()).item() for p in whole if p.numel()])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            state = {name: value for name, value in pl_module.state_dict().items() if value.numel()}
            self.sums.append(sum(torch.hash_tensor(_full(value)).item() % 2**40 for value in state.values()))


def _full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_replicas_are_equal(seen, data, case):
    """To the bit: ranks in order, those of a stage's replicas side by side."""
    for first in range(0, len(seen), data):
        assert all(seen[first]), "hashes of both kinds"
        for other in seen[first : first + data]:
            assert other == seen[first], case


def trained(cases, data, **options):
    """Weights on rank 0 of each case, and what every rank says of its replica after each step."""
    found = []
    for name, strategy in cases:
        same = Same()
        trainer = fit(
            MODELS[name](),
            loader(BATCHES * BATCH, BATCH, data),
            hybrid(**strategy),
            callbacks=[same],
            max_epochs=MODELS[name].epochs,
            **NORMS,
            **options,
        )
        found.append((weights(trainer), (same.sums, same.used)))
    return found


def one_process(model):
    return weights(fit(model(), loader(BATCHES * BATCH, BATCH), max_epochs=model.epochs, **NORMS))


def check(size, data, cases):
    expected = {name: one_process(MODELS[name]) for name, _ in cases}
    ranks = run_trainers(size, trained, cases, data, timeout=200)
    for index, (name, strategy) in enumerate(cases):
        assert_close(
            ranks[0][index][0], expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, c=cases[index]: f"{c}: {m}"
        )
        assert_replicas_are_equal([rank[index][1] for rank in ranks], data, (name, strategy))


def test_models_of_all_kinds_train_as_in_one_process():
    check(
        2, 2, [(name, {"pipeline": 1, "zero_stage": stage}) for name in MODELS if name != "sharing" for stage in STAGES]
    )


def test_models_of_all_kinds_train_as_in_one_process_over_stages():
    layouts = [{"pipeline": 2, "zero_stage": 2}, {"pipeline": 2, "zero_stage": 3, "chunks": 2}]
    cases = [(name, layout) for name in ("odd", "frozen") for layout in layouts]
    others = [("odd", {**layouts[1], "cpu_offload": True}), ("sharing", {"pipeline": 2, "zero_stage": 1})]
    check(4, 2, [*cases, *others])


def test_copies_of_shards_count_once():
    layouts = [{"pipeline": 1, "replicate_size": size, "zero_stage": stage} for size in (2, 4) for stage in STAGES]
    check(4, 4, [("odd", layout) for layout in layouts])


def choosy(stages):
    found = []
    for stage in stages:
        train = loader(BATCHES * BATCH, BATCH, 2)
        found.append(weights(fit(Choosy(), train, hybrid(1, microbatches=1, zero_stage=stage))))
    return found


def test_a_parameter_may_get_gradients_on_one_replica_only_or_on_none():
    """Stage 0 takes each gradient as it comes."""
    plain, *others = run_trainers(2, choosy, [0, *STAGES])[0]
    start = Choosy().state_dict()
    assert torch.equal(plain["never"], start["never"])
    assert not torch.equal(plain["sometimes.weight"], start["sometimes.weight"])
    for state in others:
        assert_close(state, plain, rtol=1e-9, atol=1e-12)


def offloaded(data):
    found = []
    for stage in STAGES:
        strategy = hybrid(1, zero_stage=stage, cpu_offload=True)
        trainer = fit(Odd(), loader(BATCHES * BATCH, BATCH, data), strategy, **NORMS)
        sizes = sum(local(value["exp_avg"]).numel() for value in trainer.optimizers[0].state.values())
        devices = {p.device.type for p in trainer.lightning_module.parameters()}
        found.append((weights(trainer), sizes, devices))
    return found


@pytest.mark.parametrize("data", [1, 2])
def test_offloaded_shards_train_as_in_one_process(data):
    expected = one_process(Odd)
    for state, size, devices in run_trainers(data, offloaded, data)[0]:
        assert_close(state, expected, rtol=1e-9, atol=1e-12)
        assert devices == {"cpu"}
        assert size <= sum(p.numel() for p in Odd().parameters()) / data + 40


class Validated(Model):
    """Validates, tests and predicts; in prediction it calls itself a number of times that depends on the data."""

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        y = self(batch[0])
        while (y.abs() < 2).any():  # each sample goes its own way
            y = torch.where(y.abs() < 2, y.abs() + 0.3 + self(batch[0]).abs(), y)
        return y


class Once(Validated):
    """For a pipeline, which runs a step's model once."""

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def evaluated(model, layouts, data):
    found = []
    for layout in layouts:
        strategy = hybrid(**layout) if layout else "auto"
        trainer, module = trainer_of(strategy, num_sanity_val_steps=1, use_distributed_sampler=True), model()
        train, odd = loader(BATCHES * BATCH, BATCH, data), loader(11, 4)  # one replica has fewer samples, or batches
        trainer.fit(module, train, odd)
        seen = [trainer.callback_metrics["loss"], trainer.test(module, odd, verbose=False)[0]["loss"]]
        seen.append(torch.cat(trainer.predict(module, loader(12, 4))).sum())
        found.append([float(value) for value in seen])
    return found


@pytest.mark.filterwarnings("ignore:Using .DistributedSampler.")
def test_evaluation_over_shards_may_have_different_batches_on_each_replica():
    for size, model, layouts in [
        (2, Validated, [{"pipeline": 1, "zero_stage": 3}, {"pipeline": 1, "zero_stage": 2}]),
        (4, Once, [{"pipeline": 2, "zero_stage": 3}, {"pipeline": 2, "zero_stage": 2}]),
    ]:
        expected = evaluated(model, [None], 1)[0]
        for found in run_trainers(size, evaluated, model, layouts, 2)[0]:
            assert found == pytest.approx(expected, rel=1e-9)


class Lengths(Model):
    """Takes sequences."""

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x).mean(1), y)


def lengths(stages, data):
    """Batches of another length on each replica: each then probes for itself."""
    batches = list(loader(BATCHES * BATCH, BATCH, data))
    place = dist.get_rank() % data if data > 1 else 0
    longer = [(x[:, None].expand(-1, 1 + (i + place) % 3, -1), y) for i, (x, y) in enumerate(batches)]
    train = DataLoader(longer, batch_size=None)
    strategies = [hybrid(zero_stage=stage) for stage in stages] or ["auto"]
    return [weights(fit(Lengths(), train, strategy, use_distributed_sampler=False)) for strategy in strategies]


def test_replicas_may_probe_shapes_that_others_know():
    """A sample repeated in a sequence counts as one, so that lengths make no difference to the numbers."""
    (expected,) = lengths([], 1)
    for state in run_trainers(4, lengths, STAGES, 2)[0]:
        assert_close(state, expected, rtol=1e-9, atol=1e-12)


class Own(Model):
    def split_batch(self, batch, number):
        parts = list(zip(*(leaf.tensor_split(number) for leaf in batch), strict=True))
        extra = self.trainer.strategy.ground.mesh.data_rank and self.global_step == 1
        return parts if not extra else list(zip(*(leaf.tensor_split(number + 1) for leaf in batch), strict=True))


def uneven_splits():
    with pytest.raises(ValueError, match="split_batch made 2 micro-batches on one replica and 3 on another"):
        fit(Own(), loader(BATCHES * BATCH, BATCH, 2), hybrid(1, zero_stage=2))
    return True


def test_parts_of_a_batch_that_differ_in_number_are_refused():
    assert run_trainers(2, uneven_splits) == [True, True]


class Single(Model):
    def __init__(self):
        super().__init__()
        self.bfloat16()


def summed(cases):
    """Types in which each collective over the replicas has run, and of the gradients that the optimizer saw."""
    found = []
    for stage, dtype in cases:
        ledger, seen = CommunicationLedger(), Seen()
        strategy = hybrid(1, zero_stage=stage, reduce_dtype=dtype)
        dataset = TensorDataset(*(leaf.bfloat16() for leaf in samples(BATCHES * BATCH).tensors))
        train = DataLoader(dataset, BATCH // 2, sampler=DistributedSampler(dataset, 2, dist.get_rank(), shuffle=False))
        fit(Single(), train, strategy, callbacks=[ledger, seen])
        rows = [row for row in ledger.last if row.axis == "data" and row.dtype not in ("int32", "int64")]
        found.append(({(row.collective, row.dtype) for row in rows}, seen.types))
    return found


class Seen(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.types = {p.grad.dtype for group in optimizer.param_groups for p in group["params"] if p.grad is not None}


def test_gradients_of_16_bits_are_summed_in_the_type_that_is_asked_for():
    cases = [(0, "auto"), (1, "auto"), (2, "auto"), (3, "auto"), (0, "bfloat16"), (3, "bfloat16")]
    for (stage, dtype), (rows, types) in zip(cases, run_trainers(2, summed, cases)[0], strict=True):
        name = "float32" if dtype == "auto" else dtype
        sums = {("all_reduce", name)} if stage == 0 else {("all_to_all", name), ("all_gather", "bfloat16")}
        assert rows == sums, (stage, dtype)
        assert types == {torch.bfloat16}


def presets():
    names = [f"hybrid_zero{stage}" for stage in STAGES]
    return [weights(fit(Model(), loader(BATCHES * BATCH, BATCH, 2), name)) for name in names]


def test_strategies_may_be_named():
    expected = weights(fit(Model(), loader(BATCHES * BATCH, BATCH)))
    for state in run_trainers(2, presets)[0]:
        assert_close(state, expected, rtol=1e-9, atol=1e-12)
