"""Models that a pipeline cannot run are refused before the first step, on every rank, with the names of both layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.launch import run_trainers
from tests.small import WIDTH, Block, Small, fit, hybrid, loader, trainer_of, weights


class SkipOverTheCut(Small):
    """The output of block 1 is used again after block 4, and [3, 3] cuts between them."""

    def forward(self, x):
        x = kept = self.blocks[1](self.blocks[0](self.inlet(x)))
        for block in self.blocks[2:5]:
            x = block(x)
        return self.outlet(self.blocks[5](x + kept))


class SkipToTheHead(Small):
    def forward(self, x):
        x = kept = self.blocks[0](self.inlet(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.outlet(x + kept)


class ListOfFeatures(Small):
    def forward(self, x):
        self.features = []
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
            self.features.append(x)
        return self.outlet(sum(self.features))


class LocalListOfFeatures(Small):
    def forward(self, x):
        x, features = self.inlet(x), []
        for block in self.blocks:
            x = block(x)
            features.append(x)
        return self.outlet(torch.stack(features).mean(0))


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


class BlockWithList(Block):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.square().mean())
        return super().forward(x)


class ListInBlocks(Small):
    block = BlockWithList

    def loss(self, batch):
        return super().loss(batch) + sum(block.seen[-1] for block in self.blocks)


class ModelTwice(Small):
    def loss(self, batch):
        return super().loss(batch) + self(batch[0] * 0.5).mean()


class BlockTwice(Small):
    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.blocks[5](x))


class BlockLeftOut(Small):
    def forward(self, x):
        x = self.inlet(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number != 4 else x
        return self.outlet(x)


class OtherOrder(Small):
    def forward(self, x):
        x = self.inlet(x)
        for number in (0, 1, 3, 2, 4, 5):
            x = self.blocks[number](x)
        return self.outlet(x)


class Reading(Small):
    """Reads a Python value from the output of block 1 before block 2, with ``read``."""

    def forward(self, x):
        x = self.inlet(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = self.read(x) if number == 1 else x
        return self.outlet(x)


class Item(Reading):
    def read(self, x):
        return x * x.mean().item()


class TruthValue(Reading):
    def read(self, x):
        return -x if x.sum() > 0 else x


class ToList(Reading):
    def read(self, x):
        return x * max(x.flatten().tolist())


class ToNumpy(Reading):
    def read(self, x):
        return x * float(x.detach().numpy().max())


class BooleanMask(Reading):
    def read(self, x):
        return x[x[:, 0] > 0]


class Nonzero(Reading):
    def read(self, x):
        return x + x.nonzero().shape[0]


class Checkpointed(Small):
    reentrant = True

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outlet(x)


class CheckpointedWithoutReentry(Checkpointed):
    reentrant = False


def refusal(model, options):
    """What fit says, and whether nothing was trained: on one rank."""
    module, trainer = model(), trainer_of(hybrid(**options))
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module, loader(8, 4))
    same = all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    return str(caught.value), trainer.global_step == 0 and same


READ = "reads a Python number .* from the output of blocks.1, which lives on another pipeline stage"
SIDE = "Values recorded on the side do not cross stages: .*add_auxiliary_loss"
CASES = {  # what both ranks say
    SkipOverTheCut: "blocks.5 reads a value of blocks.1, .* a skip connection crosses the cut. Choose a partition",
    SkipToTheHead: "reads a value of blocks.0, which lives on an earlier pipeline stage",
    ListOfFeatures: f"self.features keeps a value of stage 0 .blocks blocks.0 to blocks.2., .*{SIDE}",
    LocalListOfFeatures: "reads a value of blocks.0, blocks.1, which live on an earlier pipeline stage",
    FeaturesReadInTheLoss: f"self.features keeps a value of stage 0 .blocks blocks.0 to blocks.2., .*{SIDE}",
    AuxReadInTheLoss: f"blocks.0.aux is set while blocks.0 runs, on another pipeline stage, .*{SIDE}",
    ListInBlocks: f"blocks.0.seen is set while blocks.0 runs, on another pipeline stage, .*{SIDE}",
    ModelTwice: "blocks.0 was called twice in one step .*: call the model once in the step",
    BlockTwice: "blocks.5 was called twice in one step",
    BlockLeftOut: "blocks.5 was called when blocks.4 was expected",
    OtherOrder: "blocks.3 was called when blocks.2 was expected: .* pipeline_layers",
    Item: READ,
    TruthValue: READ,
    ToList: READ,
    ToNumpy: READ,
    BooleanMask: READ,
    Nonzero: READ,
    Checkpointed: "blocks.0 runs under reentrant activation checkpointing, .* use_reentrant=False",
}


@pytest.mark.parametrize("model", CASES, ids=lambda model: model.__name__)
def test_model_is_refused_on_every_rank_before_it_trains(model):
    partition = [2, 4] if issubclass(model, Reading) else [3, 3]
    for message, untouched in run_trainers(2, refusal, model, {"partition": partition}, timeout=30):
        assert_matches(message, CASES[model])
        assert untouched


@pytest.mark.parametrize("model", [SkipOverTheCut, AuxReadInTheLoss, Item], ids=lambda model: model.__name__)
@pytest.mark.parametrize(("size", "options"), [(2, {"chunks": 2}), (4, {}), (4, {"pipeline": 4})])
def test_refusal_reaches_the_ranks_of_every_layout(model, size, options):
    partition = [2, 1, 1, 2] if options else [2, 4] if model is Item else [3, 3]
    outcomes = run_trainers(size, refusal, model, {**options, "partition": partition}, timeout=30)
    for message, untouched in outcomes:
        assert_matches(message, CASES[model])
        assert untouched


def assert_matches(message, pattern):
    __tracebackhide__ = True
    import re

    assert re.search(pattern, message, re.DOTALL), f"{message}\n\ndoes not match\n\n{pattern}"
