"""A checkpoint of one ZeRO stage and layout goes on under any other, from the same weights on all replicas."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from tests.launch import run_trainers
from tests.small import hybrid, loader, samples, trainer_of, weights
from tests.test_zero import BATCH, BATCHES, Odd

LAYOUTS = [
    {"pipeline": 1, "zero_stage": 3, "replicate_size": 2},
    {"pipeline": 2, "zero_stage": 2},
    {"pipeline": 2, "zero_stage": 3, "chunks": 2, "cpu_offload": True},
    {"pipeline": 1, "zero_stage": 3, "tensor_parallel_size": 2, "tensor_parallel_plan": {"blocks.*.linear": "colwise"}},
    {"pipeline": 1, "zero_stage": 1, "cpu_offload": True},
]


class Loaded(Callback):
    """What this rank has of the weights when training begins."""

    def on_train_start(self, trainer, pl_module):
        data = trainer.strategy.assembly.engine.data
        data.gather()
        self.state = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        data.scatter()


def share(data, tensor):
    """A replica's part of the samples; ranks of the tensor axis, which are neighbours, have the same."""
    place = dist.get_rank() // tensor % data
    sampler = DistributedSampler(samples(BATCHES * BATCH), data, place, shuffle=False)
    return DataLoader(samples(BATCHES * BATCH), BATCH // data, sampler=sampler)


def train(layout, folder, epochs, name=None, resume=None):
    loaded, strategy, batches = Loaded(), "auto", loader(BATCHES * BATCH, BATCH)
    if layout:
        tensor = layout.get("tensor_parallel_size", 1)
        strategy, batches = hybrid(**layout), share(4 // layout["pipeline"] // tensor, tensor)
    trainer = trainer_of(
        strategy, max_epochs=epochs, callbacks=[loaded] if resume is not None else [], accumulate_grad_batches=2
    )
    path = folder / f"{resume}.ckpt" if resume is not None else None
    trainer.fit(Odd(), batches, ckpt_path=path)
    if name is not None:
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    return weights(trainer), getattr(loaded, "state", None)


def all_layouts(folder):
    for index, layout in enumerate(LAYOUTS):
        train(layout, folder, 1, name=index)
    found = []
    for index, layout in enumerate(LAYOUTS):
        for resume in ("stock", (index + 1) % len(LAYOUTS), index):
            found.append((index, resume, *train(layout, folder, 2, resume=resume)))
    return found


def same(found, expected, about):
    wanted = {name: expected[name] for name in found}
    assert_close(dict(found), wanted, rtol=1e-9, atol=1e-12, msg=lambda message: f"{about}: {message}")


@pytest.mark.full  # tests/test_checkpoints.py has such pairs
@pytest.mark.filterwarnings("ignore:.*It has no rule for parts")
def test_any_stage_goes_on_from_any_other(tmp_path):
    middle, _ = train(None, tmp_path, 1, name="stock")
    middle = {name: value.clone() for name, value in middle.items()}
    expected, _ = train(None, tmp_path, 2)
    for number, rank in enumerate(run_trainers(4, all_layouts, tmp_path, timeout=300)):
        for place, resume, state, start in rank:
            about = f"rank {number}, layout {place} from {resume}"
            slices = [name for name, value in start.items() if value.shape != middle[name].shape]
            assert all("blocks" in name for name in slices), about
            assert bool(slices) == ("tensor_parallel_size" in LAYOUTS[place]), about
            same({name: value for name, value in start.items() if name not in slices}, middle, about)
            if number == 0:
                assert state.keys() == expected.keys()
                same(state, expected, about)
    for path in tmp_path.glob("*.ckpt"):
        saved = torch.load(path, weights_only=False)
        same(saved["state_dict"], middle, path)
        assert not any(isinstance(v, DTensor) for v in saved["state_dict"].values())
