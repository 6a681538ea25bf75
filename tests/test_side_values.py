"""Values that leave the path through the blocks: recorded on the side, or read as Python numbers."""

from functools import partial

import numpy
import pytest
import torch
from torch import nn

from tests.small import Block, Small, check_exact, check_refused


class FeaturesOnTheModel(Small):
    def forward(self, x):
        self.features = []
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
            self.features.append(x)
        return self.outlet(sum(self.features))


class FeaturesReadInTheLoss(Small):
    def forward(self, x):
        x, self.features = self.inlet(x), {}
        for number, block in enumerate(self.blocks):
            x = self.features[number] = block(x)
        return self.outlet(x)

    def loss(self, batch):
        return super().loss(batch) + self.features[0].square().mean()


class BlockWithAux(Block):
    def forward(self, x):
        self.aux = x.square().mean()
        return super().forward(x)


class AuxReadInTheLoss(Small):
    block = BlockWithAux

    def loss(self, batch):
        return super().loss(batch) + sum(block.aux for block in self.blocks)


class NestedAux(Block):
    def __init__(self):
        super().__init__()
        self.inner = BlockWithAux()

    def forward(self, x):
        return self.inner(x)


class NestedAuxReadInTheLoss(Small):
    block = NestedAux

    def loss(self, batch):
        return super().loss(batch) + sum(block.inner.aux for block in self.blocks)


class BlockWithNumber(Block):
    def forward(self, x):
        self.size = x.detach().abs().max().item()
        return super().forward(x)


class NumberReadInTheLoss(Small):
    block = BlockWithNumber

    def loss(self, batch):
        return super().loss(batch) * max(block.size for block in self.blocks)


class BlockWithList(Block):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.square().mean())
        return super().forward(x)


class ListReadInTheLoss(Small):
    block = BlockWithList

    def loss(self, batch):
        return super().loss(batch) + sum(block.seen[-1] for block in self.blocks)


class BlockWithBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("usage", torch.zeros(()))

    def forward(self, x):
        self.usage.copy_(x.detach().square().mean())
        return super().forward(x)


class BufferReadInTheLoss(Small):
    block = BlockWithBuffer

    def loss(self, batch):
        return super().loss(batch) * (1 + sum(block.usage for block in self.blocks))


EVERYWHERE = []


class BlockWithGlobalList(Block):
    def forward(self, x):
        EVERYWHERE.append(x.square().mean())
        return super().forward(x)


class GlobalList(Small):
    block = BlockWithGlobalList

    def loss(self, batch):
        EVERYWHERE.clear()
        return super().loss(batch) + sum(EVERYWHERE)


class Context:
    def __init__(self):
        self.losses = []


class BlockWithContext(Block):
    def forward(self, x):
        self.context.losses.append(x.square().mean())
        return super().forward(x)


class SharedObject(Small):
    block = BlockWithContext

    def __init__(self):
        super().__init__()
        self.context = Context()
        for block in self.blocks:
            block.context = self.context

    def loss(self, batch):
        self.context.losses.clear()
        return super().loss(batch) + sum(self.context.losses)


class HookInAClosure(Small):
    def __init__(self):
        super().__init__()
        seen = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: seen.append(output.square().mean()))
        self.seen = lambda: seen

    def loss(self, batch):
        self.seen().clear()
        return super().loss(batch) + sum(self.seen())


SIDE = ".*do not cross stages: .*add_auxiliary_loss"
RECORDED = {
    FeaturesOnTheModel: f"self.features keeps a value of stage 0 .blocks blocks.0 to blocks.1., .*blocks.5{SIDE}",
    FeaturesReadInTheLoss: f"self.features keeps a value of stage 0 .blocks blocks.0 to blocks.1., .*blocks.5{SIDE}",
    AuxReadInTheLoss: f"blocks.0.aux is set while blocks.0 runs, on another pipeline stage, {SIDE}",
    NestedAuxReadInTheLoss: f"blocks.0.inner.aux is set while blocks.0.inner runs, on another pipeline stage, {SIDE}",
    NumberReadInTheLoss: f"blocks.0.size is set while blocks.0 runs, on another pipeline stage, {SIDE}",
    ListReadInTheLoss: f"blocks.0.seen is set while blocks.0 runs, on another pipeline stage, {SIDE}",
    BufferReadInTheLoss: "blocks.0.usage",
    GlobalList: SIDE,
    SharedObject: SIDE,
    HookInAClosure: SIDE,
}


@pytest.mark.parametrize("model", RECORDED, ids=lambda model: model.__name__)
def test_value_recorded_on_the_side_is_refused(model):
    check_refused({model: RECORDED[model]}, partition=[2, 4])


@pytest.mark.parametrize(("size", "options"), [(2, {"chunks": 2}), (4, {"pipeline": 4}), (4, {})], ids=str)
def test_refusal_reaches_every_rank_of_every_layout(size, options):
    check_refused({AuxReadInTheLoss: RECORDED[AuxReadInTheLoss]}, size, **options)


class Recording(Small):
    """Its blocks record, and nobody reads it: attributes are set, deleted and set again."""

    class block(BlockWithAux):
        def forward(self, x):
            if hasattr(self, "aux"):
                del self.aux
            return super().forward(x) * (1 + 0 * self.aux)


class BatchNorms(Small):
    class block(BlockWithBuffer):
        def forward(self, x):
            return super().forward(x) + 0 * self.usage


@pytest.mark.parametrize("model", [Recording, BatchNorms], ids=lambda model: model.__name__)
def test_what_a_block_records_for_itself_is_free(model):
    check_exact(model, partition=[2, 4], microbatches=1)


class Reading(Small):
    """Reads a Python value from the output of block 1, before block 2."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        x = self.inlet(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = READERS[self.name](x) if number == 1 else x
        return self.outlet(x)


READERS = {
    "item": lambda x: x * x.mean().item(),
    "float": lambda x: x * float(x.detach().mean()),
    "truth": lambda x: -x if x.sum() > 0 else x,
    "tolist": lambda x: x * max(x.flatten().tolist()),
    "numpy": lambda x: x * float(x.detach().numpy().max()),
    "asarray": lambda x: x * float(numpy.asarray(x.detach()).max()),
    "equal": lambda x: x + torch.equal(x, x.abs()),
    "format": lambda x: x + len(f"{x.mean():.3f}"),
    "mask": lambda x: x[x[:, 0] > 0],
    "masked_select": lambda x: x + x.masked_select(x > 0).mean(),
    "nonzero": lambda x: x + x.nonzero().shape[0],
    "unique": lambda x: x + torch.unique(x).shape[0],
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0)[: len(x)],
}


def test_python_value_of_a_block_on_another_stage_is_refused():
    read = "reads a Python number .* from the output of blocks.1, which lives on another pipeline stage"
    check_refused({partial(Reading, name): read for name in READERS}, partition=[2, 4])


@pytest.mark.parametrize("name", ["item", "truth", "tolist"])
def test_python_value_is_free_where_the_block_lives(name):
    check_exact(partial(Reading, name), partition=[1, 5], microbatches=1)


class NumberOfTheInlet(Small):
    """Reads a number before the blocks and uses it behind them."""

    def forward(self, x):
        x = self.inlet(x)
        scale, largest, positive = x.abs().mean().item(), max(x.flatten().tolist()), len(x[x[:, 0] > 0])
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * scale + largest - positive


class NumberOfAParameter(Small):
    """Uses a parameter as a tensor on the first stage and as a number on the last."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        x = self.inlet(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * self.scale.item()


@pytest.mark.parametrize("model", [NumberOfTheInlet, NumberOfAParameter], ids=lambda model: model.__name__)
def test_python_number_from_outside_the_blocks_is_known_on_every_stage(model):
    check_exact(model, partition=[3, 3], microbatches=1)
