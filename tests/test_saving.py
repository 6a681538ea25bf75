"""A checkpoint is one file, as one process would have written it: stock Lightning loads it and goes on with it."""

import copy

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchmetrics import MeanMetric

from tests.launch import run_trainers
from tests.small import LAYOUTS, WIDTH, Block, Small, fit, hybrid, loader, trainer_of, weights


class Everything(Small):
    """Tied weights, buffers of all kinds, a frozen block, a lone parameter, a persistent metric, hyperparameters."""

    class block(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("cache", torch.zeros(2), persistent=False)
            self.register_buffer("nothing", None)

        def forward(self, x):
            if self.training:
                self.steps += 1
            return super().forward(x)

    def __init__(self, rate=0.02, groups=1):
        super().__init__()
        self.save_hyperparameters()
        self.rate, self.groups = rate, groups
        self.outlet = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.outlet.weight = self.inlet.weight
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("shift", torch.full((1,), 0.25, dtype=torch.float64))
        self.metric = MeanMetric()
        self.metric.persistent(True)
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad = False

    def forward(self, x):
        return super().forward(x * self.scale).mean(1, keepdim=True) + self.shift

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        if self.groups == 1:
            return torch.optim.AdamW(self.parameters(), self.rate)
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": rest, "weight_decay": 0.0}, {"params": decayed, "lr": self.rate / 2}]
        return torch.optim.AdamW(groups, self.rate)


def saved(layout, folder):
    """Trains with one group of parameters and with two, saves, and returns what this rank sees of it."""
    pipeline, data, chunks = layout or (1, 1, 1)
    states = []
    for groups in (1, 2):
        strategy = hybrid(pipeline, chunks, microbatches=1) if layout else "auto"
        trainer = fit(Everything(groups=groups), loader(20, 4, data), strategy)
        trainer.save_checkpoint(folder / f"all-{groups}.ckpt")
        trainer.save_checkpoint(folder / f"weights-{groups}.ckpt", weights_only=True)
        states.append(weights(trainer))
    return states


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    saved(None, folder)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def written(request, tmp_path_factory):
    """A folder that many processes have written to, and what each has seen."""
    folder, (pipeline, data, _) = tmp_path_factory.mktemp("written"), request.param
    return folder, run_trainers(pipeline * data, saved, request.param, folder)


@pytest.mark.parametrize("groups", [1, 2])
def test_file_is_what_one_process_writes(written, reference, groups):
    folder, states = written
    assert {path.name for path in folder.iterdir()} == {path.name for path in reference.iterdir()}
    found, expected = (torch.load(f / f"all-{groups}.ckpt", weights_only=True) for f in (folder, reference))
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(found["state_dict"], expected["state_dict"])
    assert all(torch.equal(states[0][groups - 1][name], value) for name, value in found["state_dict"].items())
    assert all(type(value) is torch.Tensor for value in found["state_dict"].values())
    for key in ("epoch", "global_step", "hyper_parameters", "hparams_name", "lr_schedulers"):
        assert found[key] == expected[key], key
    assert set(found) >= set(expected)
    bare = torch.load(folder / f"weights-{groups}.ckpt", weights_only=True)
    assert "optimizer_states" not in bare
    torch.testing.assert_close(bare["state_dict"], expected["state_dict"])
    assert_same_optimizer(found["optimizer_states"], expected["optimizer_states"])


def assert_same_optimizer(found, expected):
    assert len(found) == len(expected) == 1
    found, expected = copy.deepcopy((found[0], expected[0]))
    for group in found["param_groups"]:
        group.pop("param_names", None)
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"])


@pytest.mark.parametrize("groups", [1, 2])
def test_one_process_loads_it_and_trains_on(written, groups):
    """As if it had trained from the start, with the module's names and the optimizer's state."""
    file = written[0] / f"all-{groups}.ckpt"
    found = torch.load(file, weights_only=True)
    module = Everything.load_from_checkpoint(file, strict=True)
    assert module.outlet.weight is module.inlet.weight
    assert all(torch.equal(module.state_dict()[name], value) for name, value in found["state_dict"].items())
    module.configure_optimizers().load_state_dict(found["optimizer_states"][0])
    resumed, whole = Everything(groups=groups), Everything(groups=groups)
    trainer = trainer_of(max_epochs=2)
    trainer.fit(resumed, loader(20, 4), ckpt_path=file)
    fit(whole, loader(20, 4), max_epochs=2)
    assert trainer.global_step == 10
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict())


def without_an_optimizer(folder, layout):
    """A checkpoint after validation alone: the model has been cut, and no training has settled what is where."""
    trainer = trainer_of(hybrid(layout[0], layout[2]))
    trainer.validate(Validated(), loader(4, 4 // layout[1]), verbose=False)
    trainer.save_checkpoint(folder / "validated.ckpt", weights_only=True)


class Validated(Everything):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_model_that_was_only_validated_is_saved_whole(layout, tmp_path):
    run_trainers(layout[0] * layout[1], without_an_optimizer, tmp_path, layout)
    found = torch.load(tmp_path / "validated.ckpt", weights_only=True)["state_dict"]
    expected = Validated().state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def while_training(folder, layout):
    """Checkpoints that a callback writes in the middle of an epoch."""
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"callbacks": [checkpoint], "enable_checkpointing": True}
    trainer = fit(Everything(), loader(20, 4, layout[1]), hybrid(layout[0], layout[2]), **options)
    dist.barrier()
    return trainer.global_step, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("layout", [(2, 2, 1), (2, 1, 2)], ids=str)
def test_saving_while_training_changes_nothing(layout, tmp_path):
    """The checkpoints hold the weights after their steps, and training goes on exactly."""
    for outcome in run_trainers(layout[0] * layout[1], while_training, tmp_path, layout):
        assert outcome == (5, ["step=2.ckpt", "step=4.ckpt"])
    for step in (2, 4):
        module = Everything()
        fit(module, loader(20, 4), max_epochs=-1, max_steps=step)
        found = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found["state_dict"][name], parameter.detach())
