"""Models that a pipeline cannot run are refused before the first step, on every rank, with the names of the layers."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.launch import run_trainers
from tests.small import WIDTH, Block, Small, check_exact, check_refused, loss_of_two_epochs

PATHS = [  # size, options; each cuts between blocks 1 and 5
    (2, {"chunks": 2, "partition": [2, 1, 1, 2]}),
    (4, {"partition": [3, 3]}),
    (4, {"pipeline": 4, "partition": [2, 1, 1, 2]}),
]


class SkipOverTheCut(Small):
    """As in a U-Net: the output of block 1 is used again before block 5."""

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


class SkipFromTheInlet(Small):
    def forward(self, x):
        x = kept = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x + kept)


class SkipFromTheSecondStepOn(SkipToTheHead):
    def forward(self, x):
        x = kept = self.blocks[0](self.inlet(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.outlet(x + kept if self.trainer.global_step else x)


class AverageOfBlocks(Small):
    def forward(self, x):
        x, features = self.inlet(x), []
        for block in self.blocks:
            x = block(x)
            features.append(x)
        return self.outlet(torch.stack(features).mean(0))


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
        for block in (*self.blocks[:4], self.blocks[5]):
            x = block(x)
        return self.outlet(x)


class LastBlockLeftOut(Small):
    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks[:5]:
            x = block(x)
        return self.outlet(x)


class OtherOrder(Small):
    def forward(self, x):
        x = self.inlet(x)
        for number in (0, 1, 3, 2, 4, 5):
            x = self.blocks[number](x)
        return self.outlet(x)


class Checkpointed(Small):
    reentrant = True

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outlet(x)


class CheckpointedWithoutReentry(Checkpointed):
    reentrant = False


class CheckpointOverTheCut(Small):
    """Checkpoints pairs of blocks."""

    def forward(self, x):
        return self.outlet(checkpoint_sequential(self.blocks, 3, self.inlet(x), use_reentrant=False))


class PenaltyOnAllParameters(Small):
    def loss(self, batch):
        return super().loss(batch) + 0.1 * sum(parameter.square().sum() for parameter in self.parameters())


class PenaltyOnTheInlet(Small):
    """Also asks for the type of the first parameter, as many models do."""

    def loss(self, batch):
        x, y = (tensor.to(next(self.parameters()).dtype) for tensor in batch)
        return super().loss((x, y)) + 0.1 * self.inlet.weight.square().sum()


class SharedModule(Small):
    """Two blocks of different stages have one module."""

    class block(Block):
        def __init__(self):
            super().__init__()
            self.other = None

        def forward(self, x):
            x = super().forward(x)
            return x if self.other is None else x + self.other(x)

    def __init__(self):
        super().__init__()
        self.blocks[1].other = self.blocks[4].other = self.make().double()

    def make(self):
        return nn.Linear(WIDTH, WIDTH)


class SharedMean(SharedModule):
    """A running mean, as of a batch norm, would go on from other values on each stage."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean.clone()

    def make(self):
        return self.Mean()


MESSAGES = {
    SharedMean: "blocks.1.other writes its buffer mean and is in blocks.4 too, on another stage: .*in one stage",
    SkipOverTheCut: "blocks.5 reads a value of blocks.1, .* a skip connection crosses the cut. Choose a partition",
    SkipToTheHead: "reads a value of blocks.0, which lives on an earlier pipeline stage",
    AverageOfBlocks: "reads a value of blocks.0, blocks.1, which live on an earlier pipeline stage",
    ModelTwice: "blocks.0 was called twice in one step .*: call the model once in the step",
    BlockTwice: "blocks.5 was called twice in one step",
    BlockLeftOut: "blocks.5 was called when blocks.4 was expected",
    LastBlockLeftOut: "The step ended without calling blocks.5. .*each block must be called once",
    OtherOrder: "blocks.3 was called when blocks.2 was expected: .* pipeline_layers",
    PenaltyOnAllParameters: "reads a value of blocks.0.linear.weight, .*blocks.2.linear.bias, which live on an earlier",
    CheckpointOverTheCut: "An activation checkpoint holds blocks.2 and blocks.3, which are on two pipeline stages",
    Checkpointed: "blocks.0 runs under reentrant activation checkpointing, .* use_reentrant=False",
}


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_path_through_the_blocks_is_refused(model):
    check_refused({model: MESSAGES[model]}, partition=[3, 3])


@pytest.mark.parametrize(("size", "options"), PATHS, ids=str)
def test_refusal_reaches_every_rank_of_every_layout(size, options):
    """The second model is refused by ranks that have refused the first, so no message of that one is left over."""
    check_refused({model: MESSAGES[model] for model in (SkipOverTheCut, BlockTwice)}, size, **options)


@pytest.mark.parametrize("partition", [[1, 5], [2, 4]], ids=str)
def test_skip_trains_exactly_with_a_partition_that_keeps_it_in_one_stage(partition):
    """With [2, 4] what is kept is what crosses the cut."""
    check_exact(SkipOverTheCut, partition=partition)


def test_a_module_that_blocks_of_two_stages_share_trains_exactly():
    check_exact(SharedModule)


def test_skip_from_before_the_blocks_trains_exactly():
    check_exact(SkipFromTheInlet, partition=[3, 3])
    check_exact(SkipFromTheInlet, size=4, partition=[3, 3])


def test_checkpointing_without_reentry_trains_exactly():
    check_exact(CheckpointedWithoutReentry, partition=[3, 3])
    check_exact(CheckpointOverTheCut, partition=[2, 4])


def test_penalty_on_parameters_outside_the_blocks_trains_exactly():
    check_exact(PenaltyOnTheInlet, partition=[3, 3])


def test_skip_that_begins_after_the_first_step_is_not_trained_silently():
    outcome = run_trainers(2, loss_of_two_epochs, SkipFromTheSecondStepOn, {"partition": [3, 3]})[0]
    assert outcome is False or "blocks.0" in outcome


class Language(Small):
    """A model of transformers instead of our blocks; `recorded` are flags of its call."""

    recorded = ()

    def __init__(self):
        super().__init__()
        del self.inlet, self.outlet, self.blocks
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4}
        self.model = self.make({**sizes, "num_attention_heads": 2, "num_key_value_heads": 1})

    def make(self, sizes):
        return LlamaForCausalLM(LlamaConfig(**sizes))

    def loss(self, batch):
        tokens = batch[0].argsort(dim=1)
        return self.model(tokens, labels=tokens, **dict.fromkeys(self.recorded, True)).loss


class HiddenStatesByCall(Language):
    recorded = ("output_hidden_states",)


class HiddenStatesByConfig(Language):
    def make(self, sizes):
        return LlamaForCausalLM(LlamaConfig(**sizes, output_hidden_states=True))


class AttentionsByCall(Language):
    recorded = ("output_attentions",)

    def make(self, sizes):
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager"))


class RouterLogitsByCall(Language):
    recorded = ("output_router_logits",)

    def make(self, sizes):
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=2))


class RouterLogitsByConfig(Language):
    def make(self, sizes):
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=2, output_router_logits=True))


FLAGS = {
    HiddenStatesByCall: "output_hidden_states",
    HiddenStatesByConfig: "output_hidden_states",
    AttentionsByCall: "output_attentions",
    RouterLogitsByCall: "output_router_logits",
    RouterLogitsByConfig: "output_router_logits",
}


@pytest.mark.parametrize("model", FLAGS, ids=lambda model: model.__name__)
def test_recording_flag_of_transformers_is_refused(model):
    flag = FLAGS[model]
    message = f"is asked for {flag}, .*model.layers.0 .*model.layers.3. Set {flag}=False; .*add_auxiliary_loss"
    check_refused({model: message})


def test_model_of_transformers_without_recording_trains_exactly():
    check_exact(Language)
