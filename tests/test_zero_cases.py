"""Reports about other systems' ZeRO, by their number in the list of cases: groups, accumulation, loading."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.functional.traffic import ring_bytes
from tests.launch import run_trainers
from tests.small import fit, hybrid, loader, trainer_of, weights
from tests.test_zero import BATCH, BATCHES, Odd, Same, assert_replicas_are_equal
from tests.test_zero_costs import Even


class OneGroup(Odd):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate, weight_decay=0.3, eps=1e-3)


class Norms(Callback):
    """The norm before each clipping."""

    def __init__(self):
        self.seen = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        norm = trainer.strategy.last_gradient_norm
        if norm is not None:
            self.seen.append(norm.item())


def clipped(models, stages, data):
    found = {}
    for model in models:
        for stage in stages:
            norms, train = Norms(), loader(BATCHES * BATCH, BATCH, data)
            strategy = hybrid(1, microbatches=1, zero_stage=stage)
            trainer = fit(model(), train, strategy, callbacks=[norms], gradient_clip_val=0.05)
            found[model.__name__, stage] = norms.seen, weights(trainer)
    return found


def test_norms_and_weights_are_the_same_for_all_stages_groups_and_sizes():
    """Case 15: one and two parameter groups, 1, 2 and 4 replicas, sizes that none of them divides."""
    models, stages = [OneGroup, Odd], [0, 1, 2, 3]
    expected = run_trainers(1, clipped, models, [0], 1)[0]
    for size in (1, 2, 4):
        ranks = run_trainers(size, clipped, models, stages, size, timeout=200)
        for (model, stage), (norms, state) in ranks[0].items():
            one_process, one_state = expected[model, 0]
            assert len(norms) == BATCHES - 1  # Lightning zeroes before the first step has clipped
            assert norms == pytest.approx(one_process, rel=1e-9), (model, stage, size)
            assert_close(state, one_state, rtol=1e-9, atol=1e-12)
            assert all(rank[model, stage][0] == norms for rank in ranks), "replicas clip alike, to the bit"
    assert expected["OneGroup", 0][0] != expected["Odd", 0][0]


def limited(stages, data):
    options = {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3}
    train = loader(BATCHES * BATCH, BATCH, data)
    strategies = ["auto" if stage is None else hybrid(1, zero_stage=stage) for stage in stages]
    return [weights(fit(Odd(), train, strategy, **options)) for strategy in strategies]


def test_clipping_by_value_is_that_of_one_process():
    """Of sums over the replicas, and not of what each of them has."""
    (expected,) = limited([None], 1)
    for state in run_trainers(2, limited, [0, 1, 2, 3], 2)[0]:
        assert_close(state, expected, rtol=1e-9, atol=1e-12)


def accumulated(stages):
    found = []
    for stage in stages:
        ledger, same = CommunicationLedger(), Same()
        strategy = hybrid(2, microbatches=3, zero_stage=stage)
        train = loader(6 * 12, 12, 2)
        trainer = fit(Even(), train, strategy, callbacks=[ledger, same], accumulate_grad_batches=2)
        rows = {row: traffic for row, traffic in ledger.last.items() if row.axis == "data" and row.dtype == "float64"}
        here = sum(p.numel() * 8 for p in trainer.strategy.assembly.engine.named_parameters().values())
        scattered = [traffic for row, traffic in rows.items() if row.collective == "all_to_all"]
        calls = sum(traffic.calls for traffic in scattered)
        units = len(trainer.strategy.assembly.engine.data.modules)
        found.append((calls / units, sum(t.wire for t in scattered) / ring_bytes("all_to_all", here, 2)))
        found[-1] += ((same.sums, same.used), weights(trainer))
    return found


def test_gradients_over_a_pipeline_are_scattered_as_often_as_documented():
    """Case 38: once a step in stage 1, once a micro-batch in stages 2 and 3; replicas stay equal to the bit."""
    expected = weights(fit(Even(), loader(6 * 12, 12), accumulate_grad_batches=2))
    ranks = run_trainers(4, accumulated, [1, 2, 3], timeout=200)
    for rank in ranks:
        assert [(calls, volume) for calls, volume, *_ in rank] == [(1, 1), (6, 6), (6, 6)]
    for index in range(3):
        assert_close(ranks[0][index][3], expected, rtol=1e-9, atol=1e-12)
        assert len(ranks[0][index][2][0]) == 3
        assert_replicas_are_equal([rank[index][2] for rank in ranks], 2, index)


def hashes(module):
    """Of each parameter that this rank has, whole."""
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.state_dict().items()}
    return {name: torch.hash_tensor(value).item() for name, value in whole.items() if value.numel()}


class Hashes(Callback):
    """Of the weights where training begins, and after its first step."""

    def on_train_start(self, trainer, pl_module):
        self.loaded = hashes(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not hasattr(self, "stepped"):
            self.stepped = hashes(pl_module)


def resumed(folder, stages):
    found = []
    for stage in stages:
        train, path = loader(BATCHES * BATCH, BATCH, 2), folder / f"{stage}.ckpt"
        trainer = trainer_of(hybrid(1, zero_stage=stage))
        trainer.fit(Odd(), train)
        trainer.save_checkpoint(path)
        seen = Hashes()
        again = trainer_of(hybrid(1, zero_stage=stage), max_epochs=2, callbacks=[seen])
        again.fit(Odd(), train, ckpt_path=path)
        found.append((seen.loaded, seen.stepped))
    dist.barrier()
    return found


def test_replicas_go_on_from_the_saved_weights_and_stay_equal(tmp_path):
    """Case 50: every replica has the saved weights, to the bit, before the first step, and the same after it."""
    first, second = run_trainers(2, resumed, tmp_path, [1, 2, 3])
    assert first == second
    for stage, (loaded, stepped) in zip([1, 2, 3], first, strict=True):
        saved = torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)["state_dict"]
        assert loaded == {name: torch.hash_tensor(value).item() for name, value in saved.items() if value.numel()}
        assert stepped.keys() == loaded.keys()
        assert stepped != loaded
