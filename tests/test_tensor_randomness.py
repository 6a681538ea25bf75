"""Dropout over a tensor axis: equal masks on what all ranks hold whole, different ones on what each holds a part of."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch.testing import assert_close

from tests.launch import run_trainers
from tests.small import fit, weights
from tests.spoken import DEPTH, LENGTH, WIDTH, Spoken, split, texts

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the whole is gathered at each call"),  # argmax of split logits
    pytest.mark.filterwarnings("ignore:You defined a .validation_step."),
]
MASKS = []
MODES = [False, True]


class Dropping(Spoken):
    """Dropout between the tensor regions and within the perceptron; blocks note the masks of both, whole."""

    class block(Spoken.block):
        noted = True

        def forward(self, x):
            x = F.dropout(x + self.attn(self.ln_1(x)), 0.1, self.training)
            hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)))
            if self.training and self.noted:
                note(x, hidden)
            return x + self.mlp["c_proj"](F.dropout(hidden, 0.1, self.training))


class Unnoted(Dropping):
    """A pipeline refuses what is recorded on the side."""

    class block(Dropping.block):
        noted = False


def note(between, within):
    """Masks of half of all elements, of the kind that dropout makes for each of the two."""
    masks = [F.dropout(torch.ones_like(x.detach()), 0.5) for x in (between, within)]
    MASKS.append([torch.tensor(mask.tolist()) > 0 for mask in masks])


def masked(mode, pipeline=1):
    seed_everything(1)
    MASKS.clear()
    strategy = split(pipeline, microbatches=2, sequence_parallel=mode)
    trainer = fit(Dropping() if pipeline == 1 else Unnoted(), texts(8), strategy, precision="64-true")
    return list(MASKS), weights(trainer)


def twice(pipeline=1):
    return {mode: [masked(mode, pipeline) for _ in range(2)] for mode in MODES}


@pytest.fixture(scope="module")
def of_two_ranks():
    return run_trainers(2, twice, timeout=240)


@pytest.mark.parametrize("mode", MODES)
def test_shards_have_masks_of_their_own_and_whole_values_equal_ones(of_two_ranks, mode):
    first, second = (rank[mode][0][0] for rank in of_two_ranks)
    assert len(first) >= DEPTH * 2 * 2  # micro-batches, steps
    for masks, others in zip(first, second, strict=True):
        for mask, other in zip(masks, others, strict=True):
            assert torch.equal(mask, other)  # of the whole value, which both ranks put together
    for between, within in first:
        assert within.shape[-1] == 4 * WIDTH
        halves = within.chunk(2, dim=-1)
        assert not torch.equal(*halves)
        assert 0.2 < (halves[0] == halves[1]).double().mean() < 0.8
        assert between.shape[1] == LENGTH
        if mode:
            assert not torch.equal(*between.chunk(2, dim=1))
    drawn = {tuple(mask.flatten().tolist()) for masks in first for mask in masks}
    assert len(drawn) == 2 * len(first)  # no two of blocks, micro-batches or steps are alike


@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_dropout_is_repeatable(of_two_ranks, mode):
    for rank in of_two_ranks:
        (masks, state), (masks_again, state_again) = rank[mode]
        assert_close(masks, masks_again, rtol=0, atol=0)
        assert all(torch.equal(state[name], state_again[name]) for name in state)


def test_a_run_with_dropout_is_repeatable_in_a_pipeline():
    for rank in run_trainers(4, twice, 2, timeout=240):
        for (_, state), (_, again) in rank.values():
            assert all(torch.equal(state[name], again[name]) for name in state)


def test_whole_weights_stay_equal_on_all_ranks():
    """Parameters that every rank holds whole take the same steps, or later masks and states would part."""
    for mode, equal in run_trainers(2, whole_weights)[0].items():
        assert equal, mode


def whole_weights():
    found = {}
    for mode in MODES:
        module = Dropping()
        fit(module, texts(8), split(sequence_parallel=mode), precision="64-true")
        mine = {name: parameter.detach() for name, parameter in module.named_parameters()}
        everyone = [None, None]
        torch.distributed.all_gather_object(everyone, mine)
        whole = Spoken().state_dict()
        shared = [name for name in mine if everyone[0][name].shape == whole[name].shape]
        assert len(shared) >= 4 * DEPTH
        found[mode] = all(torch.equal(everyone[0][name], everyone[1][name]) for name in shared)
    return found
