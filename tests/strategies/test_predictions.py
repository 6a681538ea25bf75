import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.strategies.predictions import WritersOfRankZero, gather_predictions, share_of
from tests.launch import run_ranks
from tests.small import trainer_of

CPU = torch.device("cpu")


def replica(mesh, *samples, indices=True):
    """What the last stage of this rank's replica has predicted: the number of each sample, times ten."""
    if mesh.pipeline_rank != mesh.layout.pipeline - 1:
        return None
    mine = list(samples[mesh.data_rank])
    if not mine:
        return None
    halves = [half for half in (mine[:1], mine[1:]) if half]
    outputs = [{"x": torch.tensor(half) * 10.0, "names": [f"s{i}" for i in half]} for half in halves]
    return share_of(outputs, [len(half) for half in halves], mine if indices else None)


def gathered():
    mesh = Mesh(Layout(2, 2), device=CPU)
    results = [
        gather_predictions(mesh, replica(mesh, [0, 2, 4], [1, 3, 5])),
        gather_predictions(mesh, replica(mesh, [6, 4], [5])),
        gather_predictions(mesh, replica(mesh, [8], [])),
        gather_predictions(mesh, replica(mesh, [7, 0], [3], indices=False)),
    ]
    with pytest.raises(ValueError, match="neither a value for each sample"):
        gather_predictions(mesh, share_of([1, 2], [1, 1], None) if mesh.rank == 3 else None)
    return [(value["x"].tolist(), value["names"], indices) for value, indices in results]


def test_every_rank_gets_each_sample_once_in_order():
    for found in run_ranks(4, gathered):
        assert found == [
            ([0, 10, 20, 30, 40, 50], [f"s{i}" for i in range(6)], [0, 1, 2, 3, 4, 5]),
            ([60, 50, 40], ["s6", "s5", "s4"], [6, 5, 4]),  # the order of the user's sampler
            ([80], ["s8"], [8]),
            ([70, 30, 0], ["s7", "s3", "s0"], None),
        ]


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("epoch")
        self.written = []

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written.append(predictions)


@pytest.mark.parametrize("rank", [0, 1])
def test_writers_are_silent_behind_rank_0_until_they_are_given_back(rank, monkeypatch):
    writer = Writer()
    trainer, writers = trainer_of(callbacks=[writer]), WritersOfRankZero()
    monkeypatch.setattr(type(trainer), "global_rank", rank)
    writers.silence(trainer)
    writer.on_predict_epoch_end(trainer, None)
    writers.restore()
    writer.on_predict_epoch_end(trainer, None)
    assert len(writer.written) == 2 - rank
