"""Checkpoints of a tensor axis: one file under the unmodified names, from which any other layout goes on exactly."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from tests.launch import run_trainers
from tests.small import trainer_of, weights
from tests.spoken import Spoken, split, texts

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the whole is gathered at each call"),  # argmax of split logits
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step."),
]
EPOCHS = 2
SIZES = {  # pipeline, tensor and ranks of each layout
    "one": (0, 0, 1),
    "tensor2": (1, 2, 2),
    "tensor4": (1, 4, 4),
    "pipeline2-tensor2": (2, 2, 4),
}


class Precise(Spoken):
    """In float64 before a checkpoint is loaded into it."""

    def __init__(self):
        super().__init__()
        self.double()


def strategy_of(layout, **options):
    pipeline, tensor, _ = SIZES[layout]
    return split(pipeline, tensor, **options) if pipeline else "auto"


def saved(layout, folder, **options):
    """Trains for both epochs, with a checkpoint after each."""
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = trainer_of(
        strategy_of(layout, **options), max_epochs=EPOCHS, callbacks=[checkpoint], enable_checkpointing=True,
        precision="64-true", gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(Precise(), texts(10))
    return weights(trainer)


def resumed(layout, file, **options):
    """Goes on with the second epoch."""
    trainer = trainer_of(strategy_of(layout, **options), max_epochs=EPOCHS, precision="64-true", gradient_clip_val=0.5)
    trainer.fit(Precise(), texts(10), ckpt_path=file)
    assert trainer.global_step == 6
    return weights(trainer)


same = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, dict(saved("one", folder))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    return folder, run_trainers(4, saved, "pipeline2-tensor2", folder, timeout=120)[0]


def test_file_is_what_one_process_writes(written, reference):
    (folder, state), (one_folder, one_state) = written, reference
    assert_close(dict(state), one_state, **same)
    for epoch in range(EPOCHS):
        name = f"epoch={epoch}.ckpt"
        found, expected = (torch.load(f / name, weights_only=True) for f in (folder, one_folder))
        assert list(found["state_dict"]) == list(expected["state_dict"])
        assert_close(dict(found["state_dict"]), dict(expected["state_dict"]), **same)
        assert all(type(value) is torch.Tensor for value in found["state_dict"].values())
        mine, ones = found["optimizer_states"][0]["state"], expected["optimizer_states"][0]["state"]
        assert mine.keys() == ones.keys()
        for index in ones:
            assert_close(mine[index], ones[index], **same)


def test_stock_lightning_loads_it_and_goes_on(written, reference):
    file = written[0] / "epoch=0.ckpt"
    module = Precise.load_from_checkpoint(file, strict=True)
    assert module.model.lm_head.weight is module.model.transformer["wte"].weight
    assert_close(dict(resumed("one", file)), reference[1], **same)


@pytest.mark.parametrize("layout", ["tensor2", "tensor4", "pipeline2-tensor2"])
@pytest.mark.parametrize("source", ["one", "split"])
def test_any_layout_goes_on_exactly(layout, source, written, reference):
    folder = (written if source == "split" else reference)[0]
    state = run_trainers(SIZES[layout][2], resumed, layout, folder / "epoch=0.ckpt")[0]
    assert_close(dict(state), reference[1], **same)


def test_sequence_shards_and_sharded_states_save_alike(tmp_path, reference):
    options = {"sequence_parallel": True, "zero_stage": 1}
    state = run_trainers(4, four_with, tmp_path, options)[0]
    assert_close(dict(state), reference[1], **same)
    assert_close(dict(resumed("one", tmp_path / "epoch=0.ckpt")), reference[1], **same)


def four_with(folder, options):
    return saved("pipeline2-tensor2", folder, **options)
