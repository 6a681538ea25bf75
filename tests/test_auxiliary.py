"""`add_auxiliary_loss` trains as a loss that the step would have added up itself, wherever the blocks run."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_hybrid import add_auxiliary_loss
from lightning_hybrid.parallel.pipeline.microbatch import split_sizes
from tests.launch import run_trainers
from tests.small import LAYOUTS, Block, Small, fit, hybrid, loader, weights

BATCH = 5  # samples of a replica, cut into 3 and 2


class BlockWithAux(Block):
    def forward(self, x):
        self.aux = self.balance(x)
        return super().forward(x)

    @staticmethod
    def balance(x):
        return x.square().mean() + x.mean().abs()


class BlockThatAdds(BlockWithAux):
    def forward(self, x):
        return add_auxiliary_loss(Block.forward(self, x), self.balance(x))


class Adding(Small):
    """Its blocks add their losses; what the step returns and logs does not contain them."""

    block = BlockThatAdds

    def __init__(self, weighted=False):
        super().__init__()
        self.weighted = weighted

    def loss(self, batch):
        x, y = batch
        weight = self.sample_weights(x)
        return (weight * (self(x) - y).square()).sum() / weight.sum()

    def sample_weights(self, x):
        return 1 + 3 * (x[:, :1] > 0) if self.weighted else torch.ones_like(x[:, :1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "loss_weight": self.sample_weights(batch[0]).sum()} if self.weighted else loss


class AddingInCheckpoints(Adding):
    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outlet(x)


class Summing(Adding):
    """The reference: one batch, in the same parts with the same weights, each with the blocks' losses in its loss."""

    block = BlockWithAux

    def __init__(self, weighted=False, data=1, microbatches=2):
        super().__init__(weighted)
        self.data, self.microbatches = data, microbatches

    def parts(self, batch):
        for replica in range(self.data):
            mine = [tensor[replica :: self.data] for tensor in batch]
            sizes = split_sizes(len(mine[0]), self.microbatches)
            yield from zip(*(tensor.split(sizes) for tensor in mine), strict=True)

    def training_step(self, batch, batch_idx):
        total = weight = 0
        for part in self.parts(batch):
            share = self.sample_weights(part[0]).sum()
            total += share * (self.loss(part) + sum(block.aux for block in self.blocks))
            weight += share
        return total / weight


def trained(model, data, options, fit_options):
    """Weights after three steps, by an ordinary strategy if there are no options of ours."""
    strategy = "auto" if options is None else hybrid(**options)
    return weights(fit(model, loader(3 * BATCH * data, BATCH * data, data), strategy, **fit_options))


def check_equal_to_one_process(model, reference, size, options, data=1, **fit_options):
    found = run_trainers(size, trained, model, data, options, fit_options)[0]
    train = loader(3 * BATCH * data, BATCH * data)
    torch.testing.assert_close(found, dict(weights(fit(reference, train, **fit_options))))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("pipeline", "data", "chunks"), LAYOUTS)
def test_blocks_losses_count_with_the_weight_of_their_microbatch(pipeline, data, chunks, weighted):
    options = {"pipeline": pipeline, "chunks": chunks}
    check_equal_to_one_process(Adding(weighted), Summing(weighted, data), pipeline * data, options, data)


@pytest.mark.parametrize(("pipeline", "data"), [(2, 2), (1, 2)])
def test_replication_without_sharding_is_exact_too(pipeline, data):
    options = {"pipeline": pipeline, "zero_stage": 0}
    check_equal_to_one_process(Adding(), Summing(data=data), pipeline * data, options, data)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_accumulation_divides_the_blocks_losses_as_the_loss(pipeline):
    options = {"pipeline": pipeline}
    check_equal_to_one_process(Adding(), Summing(), pipeline, options, accumulate_grad_batches=2)


def test_one_microbatch_is_exact_too():
    check_equal_to_one_process(Adding(), Summing(microbatches=1), 2, {"microbatches": 1})


def test_checkpointed_block_adds_its_loss_once():
    check_equal_to_one_process(AddingInCheckpoints(), Summing(), 2, {})


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process_trains_the_same(options, accumulate):
    """With our strategy on one process."""
    options = {"pipeline": 1, "microbatches": 1} | options
    reference = Summing(microbatches=options["microbatches"])
    check_equal_to_one_process(Adding(), reference, 1, options, accumulate_grad_batches=accumulate)


def test_ordinary_strategy_trains_the_same():
    found = trained(Adding(), 1, None, {})
    torch.testing.assert_close(found, trained(Summing(microbatches=1), 1, None, {}))


def test_loss_of_several_numbers_is_refused():
    with pytest.raises(ValueError, match=r"loss must be a scalar, got shape \[2\]"):
        add_auxiliary_loss(torch.zeros(3), torch.zeros(2))


def test_values_pass_unchanged():
    x = torch.randn(3)
    assert torch.equal(add_auxiliary_loss(x, torch.tensor(1.0)), x)
