"""The life of folders: every moment of a run, hooks that change them, and what models are made of."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.testing import assert_close
from torchmetrics import MeanMetric

from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from tests.launch import run_trainers
from tests.saving_jobs import verify
from tests.small import WIDTH, Small, fit, hybrid, loader, trainer_of, weights

ASYNC = {"state_dict_type": "sharded", "async_save": True}
SHARDED = {"state_dict_type": "sharded"}


def wholes(path, prefix="model."):
    reader = FolderReader(path)
    return {name.removeprefix(prefix): reader.whole(name) for name in reader.names if name.startswith(prefix)}


def same(found, expected):
    assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Whole(Small):
    """All steps, and predictions."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def whole_life(strategy, data, folder):
    """Case 21: what each call on one Trainer says."""
    module, train, val = Whole(), loader(16, 4, data), loader(8, 4, data, seed=1)
    best = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    trainer = trainer_of(strategy, max_epochs=2, callbacks=[best], enable_checkpointing=True)
    trainer.fit(module, train, val)
    found = [trainer.validate(module, val, verbose=False), trainer.test(module, val, "best", verbose=False)]
    found.append(torch.cat(trainer.predict(module, val)))
    trainer.save_checkpoint(folder / "saved.ckpt")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, train, val)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, train, val, ckpt_path=folder / "end.ckpt")
    found.append(trainer.validate(module, val, ckpt_path="last", verbose=False))
    return [*found, trainer.global_step, dict(weights(trainer))]


def lives(folder):
    return [whole_life(hybrid(p, **ASYNC), 2 // p, folder / f"{p}") for p in (2, 1)]


def test_all_calls_on_one_trainer(tmp_path):
    expected = whole_life("auto", 1, tmp_path / "one")
    for rank, found in enumerate(run_trainers(2, lives, tmp_path, timeout=200)):
        for life in found:
            same(life[: None if rank == 0 else -1], expected[: None if rank == 0 else -1])
    saved = torch.load(tmp_path / "one" / "saved.ckpt", weights_only=True)
    for p in (1, 2):
        assert verify(tmp_path / f"{p}" / "saved.ckpt") == 8
        same(wholes(tmp_path / f"{p}" / "saved.ckpt"), dict(saved["state_dict"]))


class Parts(Small):
    """Case 23: a tied head, buffers that are saved or not, a batch norm, a frozen block, a metric with a state."""

    def __init__(self, compiled=False):
        super().__init__()
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.inlet.weight
        self.norm, self.metric = nn.BatchNorm1d(WIDTH), MeanMetric()
        self.metric.persistent(True)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.double()
        self.metric.set_dtype(torch.float64)
        self.blocks[1].requires_grad_(False)
        for block in self.blocks if compiled else ():
            block.compile(backend="eager")

    def forward(self, x):
        return super().forward(self.norm(self.tied(x))) * self.passing[0]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)


def parts(folder):
    """Cases 23 and 25: each kind of model saves a folder and a file, and goes on from the other one's."""
    states = {}
    for name in ("plain", "compiled"):
        module = Parts(name == "compiled")
        trainer = fit(module, loader(8, 4), hybrid(microbatches=1, **SHARDED))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        full = fit(Parts(name == "compiled"), loader(8, 4), hybrid(microbatches=1))
        full.save_checkpoint(folder / f"{name}-full.ckpt")
    for name in ("plain", "compiled"):
        other = "compiled" if name == "plain" else "plain"
        for kind in ("", "-full"):
            trainer = trainer_of(hybrid(microbatches=1), max_epochs=2)
            trainer.fit(Parts(name == "compiled"), loader(8, 4), ckpt_path=folder / f"{other}{kind}.ckpt")
            states[name + kind] = dict(weights(trainer))
    return states


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_folders_hold_what_files_hold_and_compiled_blocks_have_the_names_of_plain_ones(tmp_path):
    states = run_trainers(2, parts, tmp_path, timeout=200)[0]
    expected = dict(weights(fit(Parts(), loader(8, 4), max_epochs=2)))
    for state in states.values():
        same(*({key: value for key, value in s.items() if "metric" not in key} for s in (state, expected)))
    for name in ("plain", "compiled"):
        file = torch.load(tmp_path / f"{name}-full.ckpt", weights_only=True)
        reader, state = FolderReader(tmp_path / f"{name}.ckpt"), file["state_dict"]
        others = reader.training()["state_dict"]
        saved = {"model." + key for key in state if key not in others}
        assert saved == {*(n for n in reader.names if n.startswith("model.")), *reader.manifest.tied}
        assert reader.manifest.tied == {"model.tied.weight": "model.inlet.weight"}
        for key, value in state.items():
            assert torch.equal(others[key] if key in others else reader.whole("model." + key), value), key
        assert set(reader.training()["callbacks"]) == set(file["callbacks"])
        module = Parts()
        module.load_state_dict({key: others[key] if key in others else reader.whole("model." + key) for key in state})


@dataclass
class Note:
    text: str


class Keeps(Callback):
    """Case 19: a state that is no plain container."""

    state = None

    def state_dict(self):
        return {"note": Note("kept"), "time": timedelta(seconds=3)}

    def load_state_dict(self, state_dict):
        self.state = state_dict


def flags(folder):
    found = []
    for name, options in {"folder": SHARDED, "file": {}}.items():
        path = folder / f"{name}.ckpt"
        fit(Small(), loader(8, 4), hybrid(**options), callbacks=[Keeps()]).save_checkpoint(path)
        for flag in (None, True, False):
            keeps = Keeps()
            trainer = trainer_of(hybrid(**options), max_epochs=2, callbacks=[keeps])
            try:
                trainer.fit(Small(), loader(8, 4), ckpt_path=path, weights_only=flag)
            except Exception as error:
                found.append((name, flag, "weights_only" in str(error)))
            else:
                found.append((name, flag, keeps.state))
    return found


def test_weights_only_is_heeded(tmp_path):
    kept = {"note": Note("kept"), "time": timedelta(seconds=3)}
    for found in run_trainers(2, flags, tmp_path):
        assert found == [(n, f, kept if f is False else True) for n in ("folder", "file") for f in (None, True, False)]


class Moments(Callback):
    """Saves a folder at moments of a fit."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, name):
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_sanity_check_end(self, trainer, pl_module):
        self.save(trainer, "sanity")

    def on_train_start(self, trainer, pl_module):
        self.save(trainer, "start")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.save(trainer, f"validation-{trainer.global_step}")


MOMENTS = [(2, {}), (1, {"zero_stage": 2}), (1, {"zero_stage": 3, "cpu_offload": True})]


def moments(folder):
    """Of each layout: weights and rates after going on from a save that came before the first step of a resumed run."""
    found = []
    for number, (pipeline, options) in enumerate(MOMENTS):
        here, data = folder / f"{number}", 2 // pipeline
        batches = loader(16, 4, data), loader(8, 4, data, seed=1)
        few = {"num_sanity_val_steps": 1, "val_check_interval": 2}
        strategy = {**options, **(ASYNC if number else SHARDED)}
        first = fit(Whole(), batches[0], hybrid(pipeline, **strategy), batches[1], callbacks=[Moments(here)], **few)
        first.save_checkpoint(here / "end.ckpt")
        trainer = trainer_of(hybrid(pipeline, **strategy), max_epochs=2, callbacks=[Moments(here / "on")], **few)
        trainer.fit(Whole(), *batches, ckpt_path=here / "end.ckpt")
        again = trainer_of(hybrid(pipeline, **strategy), max_epochs=2)
        again.fit(Whole(), *batches, ckpt_path=here / "on" / "start.ckpt")
        found.append((dict(weights(trainer)), dict(weights(again))))
        only = trainer_of(hybrid(pipeline, **strategy))
        only.validate(Whole(), batches[1], ckpt_path=here / "end.ckpt", verbose=False)
        only.save_checkpoint(here / "only.ckpt")
    return found


def test_every_moment_can_be_saved(tmp_path):
    """Before the first step, right after resuming, after a validation within an epoch, and without a fit."""
    found = run_trainers(2, moments, tmp_path, timeout=240)[0]
    reference = fit(Small(), loader(16, 4), max_epochs=2)
    steps = {"sanity": 0, "start": 0, "validation-2": 2, "validation-4": 4, "end": 4, "only": 0}
    for number in range(len(MOMENTS)):
        here = tmp_path / f"{number}"
        assert {path.stem: verify(path) for path in here.glob("*.ckpt")} == steps
        for name, step in steps.items():
            one = fit(Small(), loader(16, 4), max_steps=step) if step else None
            state = dict(weights(one)) if one else dict(Small().state_dict())
            end = dict(weights(fit(Small(), loader(16, 4))))
            same(wholes(here / f"{name}.ckpt"), end if name == "only" else state)
        moments_at = [wholes(path, "optimizer.0.") for path in (here / "end.ckpt", here / "on" / "start.ckpt")]
        assert moments_at[0]
        assert_close(*moments_at, rtol=0, atol=0)
        for state in found[number]:
            same(state, dict(weights(reference)))


class Renames(Small):
    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state["renamed"] = state.pop("inlet.weight")
        del state["outlet.bias"]
        state["added"] = torch.full((2,), 7.0)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        assert torch.equal(state.pop("added"), torch.full((2,), 7.0))
        state["inlet.weight"] = state.pop("renamed")
        state["outlet.bias"] = torch.zeros(1, dtype=torch.float64)


class Halves(Small):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["inlet.weight"] = checkpoint["state_dict"]["inlet.weight"].half()


class Fronts(Small):
    """Names a parameter otherwise itself."""

    def state_dict(self, *args, **kwargs):
        return {name.replace("inlet", "front"): value for name, value in super().state_dict(*args, **kwargs).items()}


def hooked(folder):
    trainer = fit(Renames(), loader(8, 4), hybrid(**SHARDED))
    before = dict(weights(trainer))
    trainer.save_checkpoint(folder / "a.ckpt")
    other = trainer_of(hybrid(**SHARDED))
    other.predict(Renames(), loader(8, 4), ckpt_path=folder / "a.ckpt")
    with pytest.raises(RuntimeError, match=r"checkpoint\['state_dict'\] holds something made of values"):
        fit(Halves(), loader(8, 4), hybrid(**SHARDED)).save_checkpoint(folder / "b.ckpt")
    with pytest.raises(RuntimeError, match=r"front\.weight is in the state of Fronts as something else"):
        fit(Fronts(), loader(8, 4, 2), hybrid(1, zero_stage=3, **SHARDED)).save_checkpoint(folder / "b.ckpt")
    return before, dict(weights(other))


def test_hooks_rename_delete_and_add(tmp_path):
    before, after = run_trainers(2, hooked, tmp_path)[0]
    stored = wholes(tmp_path / "a.ckpt")
    assert torch.equal(stored["renamed"], before["inlet.weight"])
    assert not {"inlet.weight", "outlet.bias"} & set(stored)
    assert_close(after, {**before, "outlet.bias": torch.zeros(1, dtype=torch.float64)}, rtol=0, atol=0)
    assert not (tmp_path / "b.ckpt").exists()
