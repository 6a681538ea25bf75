import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_hybrid import measure_costs
from lightning_hybrid.parallel.pipeline.gates import Gate, GateKeeper, add_gate
from lightning_hybrid.strategies.costs import block_bytes, estimated_costs


class Clock:
    """Time that passes only where a layer says so."""

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        clock.time += forward
        ctx.clock, ctx.backward = clock, backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.time += ctx.backward
        return gradient, None, None, None


@torch.compiler.disable
def spend(x, clock, forward, backward):
    return Spend.apply(x, clock, forward, backward)


class Layer(nn.Module):
    def __init__(self, clock, forward, backward):
        super().__init__()
        self.clock, self.times = clock, (forward, backward)
        self.scale, self.tilt = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, states=None):
        x = x if states is None else x + states
        return self.dropout(spend(x * self.tilt, self.clock, *self.times) * self.scale)


class Timed(LightningModule):
    """An embedding of 1 + 2 seconds, an encoder, a link of 3 + 1, a decoder that reads the encoder, a head of 5 + 7."""

    def __init__(self, clock):
        super().__init__()
        self.embed, self.link, self.head = Layer(clock, 1, 2), Layer(clock, 3, 1), Layer(clock, 5, 7)
        self.encoder = nn.ModuleList([Layer(clock, 10, 20), Layer(clock, 30, 40)])
        self.decoder = nn.ModuleList([Layer(clock, 50, 60), Layer(clock, 70, 80)])
        self.mean = MeanMetric()
        self.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.count = int(self.calls)
        states = self.embed(batch)
        for block in self.encoder:
            states = self.run(block, states)
        x = self.link(states)
        for block in self.decoder:
            x = x + self.run(block, x, states=states)
        loss = self.head(x).mean()
        self.mean(loss.detach())
        self.log("loss", loss)
        self.log_dict({"mean": self.mean})
        return loss

    def run(self, block, *args, **kwargs):
        return block(*args, **kwargs)


LISTS = ["encoder", "decoder"]
EXPECTED = [1 + 2 + 10 + 20, 30 + 40 + 3 + 1, 50 + 60, 70 + 80 + 5 + 7]
BATCH = torch.ones(3, 2)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def test_times_are_those_of_each_block_and_what_stands_beside_it(clock):
    assert measure_costs(Timed(clock), BATCH, pipeline_layers=LISTS) == EXPECTED


class Compiled(Timed):
    def __init__(self, clock):
        super().__init__(clock)
        for block in self.decoder:
            block.compile(backend="eager")


class Checkpointed(Timed):
    def run(self, block, *args, **kwargs):
        return checkpoint(block, *args, use_reentrant=False, **kwargs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_blocks_are_measured_as_they_run(clock):
    assert measure_costs(Compiled(clock), BATCH, pipeline_layers=LISTS) == EXPECTED


def test_recomputing_belongs_to_the_backward_pass(clock):
    again = [10, 30, 50, 70]
    expected = [cost + forward for cost, forward in zip(EXPECTED, again, strict=True)]
    assert measure_costs(Checkpointed(clock), BATCH, pipeline_layers=LISTS) == expected


def test_a_frozen_start_has_no_backward_pass(clock):
    module = Timed(clock)
    module.embed.requires_grad_(False), module.encoder.requires_grad_(False)
    assert measure_costs(module, BATCH, pipeline_layers=LISTS) == [11, 34, *EXPECTED[2:]]


def test_a_late_runs_time_does_not_count(clock):
    module = Timed(clock)
    slow = iter([100, 0, 0, 900, 0, 0])  # the first warms up
    module.head.register_forward_pre_hook(lambda *_: setattr(clock, "time", clock.time + next(slow)))
    assert measure_costs(module, BATCH, pipeline_layers=LISTS) == EXPECTED


def test_the_module_is_as_before_afterwards(clock):
    module = Timed(clock)
    (module.head.scale * 3).backward()
    keys, classes = list(module.state_dict()), [type(child) for child in module.modules()]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    measure_costs(module, BATCH, pipeline_layers=LISTS)
    assert torch.equal(torch.rand(1), expected)
    assert float(module.calls) == 0
    assert not hasattr(module, "count")
    assert float(module.mean.weight) == 0
    assert not {"log", "log_dict"} & set(vars(module))
    assert {name: p.grad.item() for name, p in module.named_parameters() if p.grad is not None} == {"head.scale": 3.0}
    assert list(module.state_dict()) == keys
    assert [type(child) for child in module.modules()] == classes


class Twice(Timed):
    def run(self, block, *args, **kwargs):
        return block(block(*args, **kwargs))


class Skipping(Timed):
    def run(self, block, x, **kwargs):
        return x if block is self.decoder[1] else block(x, **kwargs)


@pytest.mark.parametrize(
    ("model", "said"),
    [(Twice, "calls encoder.0 twice, or not in order"), (Skipping, r"ended without calling decoder.1\.")],
)
def test_a_step_that_no_pipeline_can_run_is_refused(model, said, clock):
    module = model(clock)
    classes = [type(child) for child in module.modules()]
    with pytest.raises(RuntimeError, match=rf"{said}.*runs each block once"):
        measure_costs(module, BATCH, pipeline_layers=LISTS)
    assert [type(child) for child in module.modules()] == classes


def test_what_cannot_be_measured_is_refused(clock):
    module = Timed(clock)
    with pytest.raises(ValueError, match="num_runs=0 must be at least 1"):
        measure_costs(module, BATCH, num_runs=0)
    add_gate(module.encoder[0], Gate(GateKeeper(torch.device("cpu")), "encoder.0", 0, owned=True))
    with pytest.raises(RuntimeError, match="cut by a Trainer"):
        measure_costs(module, BATCH)
    del module.encoder, module.decoder
    with pytest.raises(ValueError, match="no blocks to measure"):
        measure_costs(module, BATCH)


class Embeddings(nn.Module):
    """As in many models: one module of tables and a norm."""

    def __init__(self):
        super().__init__()
        self.word, self.bag, self.norm = nn.Embedding(10, 2), nn.EmbeddingBag(7, 2), nn.LayerNorm(2)


def test_estimates_leave_out_what_is_looked_up_and_count_weights_where_they_multiply():
    module = nn.Module()
    module.embeddings, module.head = Embeddings(), nn.Linear(2, 10, bias=False)
    module.head.weight = module.embeddings.word.weight
    module.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    module.blocks[1].weight = module.blocks[0].weight
    assert estimated_costs(module, ["blocks.0", "blocks.1", "blocks.2"]) == [4 + 4 + 20, 4, 4]
    assert block_bytes(module, ["blocks.0", "blocks.1", "blocks.2"]) == [4 * (20 + 14 + 4 + 4), 16, 16]
