"""Folders of one process, of models made on the meta device, of masters, of what thaws, and replicas that load one."""

import hashlib
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.testing import assert_close

from lightning_hybrid.precision import FP16MasterWeights, MasterWeights
from tests.launch import run_trainers
from tests.meta_models import Tied, word_loader
from tests.small import Small, fit, hybrid, loader, trainer_of, weights
from tests.test_checkpoint_life import SHARDED, wholes

ASYNC = {**SHARDED, "async_save": True}
MASTERS = {"bf16": MasterWeights, "fp16": partial(FP16MasterWeights, init_scale=64.0, growth_interval=3)}


class Saves(Callback):
    """Saves when training starts, and after the first epoch."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"start-{trainer.current_epoch}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "epoch.ckpt")


def twice(module, batches, folder, plugins=(), **options):
    """States of two epochs without a stop, and of a run that goes on after the first."""
    states = []
    for resume in (None, folder / "epoch.ckpt"):
        callback = Saves(folder if resume is None else folder / "on")
        trainer = trainer_of(
            hybrid(**options),
            max_epochs=2,
            callbacks=[callback],
            plugins=[make() for make in plugins],
            use_distributed_sampler=False,
        )
        trainer.fit(module(), *batches(), ckpt_path=resume)
        state = trainer.strategy.optimizer_state(trainer.optimizers[0]).get("state")
        states.append((dict(weights(trainer)), state))
    return states


def batches(data=1):
    return (loader(16, 4, data),)


def word_batches(data):
    return word_loader(24, 8, data, dist.get_rank() % data), word_loader(4, 2)


class AdamW(Small):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def alone(folder):
    """One process: Lightning's own path, and micro-batches."""
    return [twice(AdamW, batches, folder / f"{number}", pipeline=1, microbatches=number, **ASYNC) for number in (1, 2)]


def test_one_process_goes_on_from_its_folders(tmp_path):
    expected = fit(AdamW(), loader(16, 4), max_epochs=2)
    for (whole, on), number in zip(run_trainers(1, alone, tmp_path)[0], (1, 2), strict=True):
        assert_close(whole, on, rtol=0, atol=0)
        assert_close(whole[0], dict(weights(expected)), rtol=1e-9, atol=1e-12)
        assert_close(whole[1], expected.optimizers[0].state_dict()["state"], rtol=1e-9, atol=1e-12)
        same = [wholes(tmp_path / f"{number}" / name, "") for name in ("epoch.ckpt", "on/start-1.ckpt")]
        assert_close(*same, rtol=0, atol=0)


class Single(AdamW):
    """In float32, with 16 bits in its steps."""

    def __init__(self):
        super().__init__()
        self.float()

    def loss(self, batch):
        return super().loss([part.float() for part in batch])


def others(folder):
    """Models from the meta device, whose blocks exist only while they run until the first step, and masters."""
    found = {}
    for number, options in enumerate([{"pipeline": 2}, {"pipeline": 1, "zero_stage": 3}]):
        data = 2 // options["pipeline"]
        words, numbers = partial(word_batches, data), partial(batches, data)
        found[f"meta {number}"] = twice(Tied, words, folder / f"meta {number}", **options, **SHARDED)
        for kind, plugin in MASTERS.items():
            name = f"masters {kind} {number}"
            found[name] = twice(Single, numbers, folder / name, [plugin], **options, **ASYNC)
    return found


def test_meta_models_and_masters_go_on_bit_for_bit(tmp_path):
    found = run_trainers(2, others, tmp_path, timeout=200)[0]
    for name, (whole, on) in found.items():
        assert_close(whole, on, rtol=0, atol=0, msg=lambda message, name=name: f"{name}: {message}")
        saved, start = (wholes(tmp_path / name / path, "") for path in ("epoch.ckpt", "on/start-1.ckpt"))
        assert_close(saved, start, rtol=0, atol=0, msg=lambda message, name=name: f"{name}: {message}")
        first = wholes(tmp_path / name / "start-0.ckpt")
        assert first
        assert all(not name.startswith("masters") or tensor.dtype == torch.float32 for tensor in first.values())
    starts = [wholes(tmp_path / f"meta {number}" / "start-0.ckpt") for number in (0, 1)]
    assert_close(*starts, rtol=0, atol=0)


class Thaws(AdamW):
    def __init__(self, frozen):
        super().__init__()
        for block in self.blocks[:2]:
            block.requires_grad_(not frozen)


def thawed(folder):
    options = [{"pipeline": 2}, {"pipeline": 1, "zero_stage": 2}]
    states = []
    for number, source in enumerate(options):
        data = 2 // source["pipeline"]
        trainer = fit(Thaws(True), loader(16, 4, data), hybrid(**source, **SHARDED))
        trainer.save_checkpoint(folder / f"{number}.ckpt")
    for number, target in enumerate(options):
        data = 2 // target["pipeline"]
        trainer = trainer_of(hybrid(**target), max_epochs=2)
        trainer.fit(Thaws(False), loader(16, 4, data), ckpt_path=folder / f"{1 - number}.ckpt")
        states.append(dict(weights(trainer)))
    return states


def test_what_was_frozen_may_thaw(tmp_path):
    found = run_trainers(2, thawed, tmp_path)[0]
    fit(Thaws(True), loader(16, 4)).save_checkpoint(tmp_path / "one.ckpt")
    one = trainer_of(max_epochs=2)
    one.fit(Thaws(False), loader(16, 4), ckpt_path=tmp_path / "one.ckpt")
    for state in found:
        assert_close(state, dict(weights(one)), rtol=1e-9, atol=1e-12)


class Hashes(Callback):
    """Of every parameter and buffer that this rank holds, when training starts and after each step."""

    def __init__(self):
        self.seen = []

    def look(self, trainer):
        engine = trainer.strategy.assembly.engine
        state = {**engine.named_parameters(), **dict(engine.root.named_buffers())}
        hashes = {
            name: hashlib.sha256(tensor.detach().clone().numpy().tobytes()).hexdigest()
            for name, tensor in state.items()
        }
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, hashes)
        self.seen.append(everyone)

    def on_train_start(self, trainer, pl_module):
        self.look(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.look(trainer)


def hashed(folder):
    found = []
    for number, options in enumerate([SHARDED, {}]):
        trainer = fit(AdamW(), loader(16, 4, 2), hybrid(1, zero_stage=0, **options))
        trainer.save_checkpoint(folder / f"{number}.ckpt")
        hashes = Hashes()
        trainer = trainer_of(hybrid(1, zero_stage=0), max_epochs=2, callbacks=[hashes])
        trainer.fit(AdamW(), loader(16, 4, 2), ckpt_path=folder / f"{number}.ckpt")
        found.append(hashes.seen)
    return found


def test_replicas_are_equal_after_loading_and_after_a_step(tmp_path):
    """Case 50."""
    folder, file = run_trainers(2, hashed, tmp_path)[0]
    for seen in (folder, file):
        assert len(seen) == 5
        assert all(first and first == second for first, second in seen)
        assert all(seen[0][0][name] != value for name, value in seen[1][0].items())
    assert folder == file
