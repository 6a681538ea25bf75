"""A rank is killed in the middle of a save: the job ends, the checkpoint before stands, and the run goes on."""

import pytest
from torch.utils.data import DataLoader

from tests.jobs import run_job
from tests.launch import run_trainers
from tests.saving_jobs import BATCHES, FILES, NEW, OVER, POINTS, STEPS, go_on, struck_run
from tests.small import Small, samples, trainer_of, weights
from tests.test_checkpoints import same

SHORT = [  # rank, point, save, pipeline, async_save
    (1, "amid tensors", NEW, 1, False),
    (0, "moved in", OVER, 2, False),
    (0, "before manifest", OVER, 1, True),
    (1, "plan", NEW, 2, True),
    (0, "amid the file", OVER, 2, True),
    (1, "tensors sent", NEW, 1, False),
]
RANKS = {**dict.fromkeys(("plan", "first tensor", "amid tensors", "amid the old data"), (0, 1)), "tensors sent": (1,)}
ALL = [
    (rank, point, save, 1 + (number + rank + save) % 2, asynchronous)
    for number, point in enumerate(POINTS)
    for rank in RANKS.get(point, (0,))
    for save in (NEW, OVER)
    for asynchronous in (False, True)
    if save == OVER or point not in ("moved in", "manifest replaced", "amid the old data", "before the old data goes")
]


def check(strikes, tmp_path):
    tasks = []
    for number, (rank, point, save, pipeline, asynchronous) in enumerate(strikes):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        kind = {"async_save": asynchronous, "state_dict_type": "full" if point in FILES else "sharded"}
        ended = run_job(2, struck_run, folder, rank, point, save, pipeline, kind)
        assert None not in ended.codes, str(ended)
        assert ended.codes[rank] == -9, str(ended)
        assert ended.codes[1 - rank] not in (0, None), str(ended)
        assert f"ank {rank} failed first: its process (" in ended.logs[1 - rank], str(ended)
        (folder / "log-0").unlink()
        (folder / "log-1").unlink()
        tasks.append((folder, pipeline, kind))
    outcomes = run_trainers(2, go_on, tasks, timeout=300)
    reference = trainer_of(max_steps=STEPS, max_epochs=-1)
    reference.fit(Small(), DataLoader(samples(BATCHES * 4), 4))
    for (rank, point, save, pipeline, asynchronous), (at, state, names) in zip(strikes, outcomes[0], strict=True):
        about = f"rank {rank}, {point}, save {save}, pipeline {pipeline}, async_save {asynchronous}"
        assert at.pop("step=2.ckpt") == 2, about
        last, named = at.pop("last.ckpt"), at.pop("step=4.ckpt", None)
        assert last in ((2,) if save == NEW else (2, 4)), about
        assert named in ((None, 4) if save == NEW else (4,)), about
        assert not at, about
        same(state, dict(weights(reference)), about)
        again = ["step=4-v1.ckpt"] if named is not None and last == 2 else []  # Lightning keeps the one that is there
        assert names == ["last.ckpt", "step=2.ckpt", *again, *(f"step={step}.ckpt" for step in (4, 6, 8))], about


def test_the_checkpoint_before_stands_and_the_run_goes_on(tmp_path):
    check(SHORT, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_at_every_point(tmp_path, part):
    check(ALL[part::4], tmp_path)
