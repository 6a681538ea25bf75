from types import SimpleNamespace

import pytest

from lightning_hybrid.strategies.resuming import random_of

ENTRY = {"layout": {"pipeline": 2, "data": 2, "tensor": 2}, "random": list(range(8))}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((1, 1, 0), 6),  # the same place
        ((0, 1, 1), 3),
        ((2, 1, 1), 2),  # a stage more: the first rank of the replica
        ((1, 0, 2), 0),
        ((0, 2, 0), None),  # a replica more
    ],
)
def test_a_rank_goes_on_with_the_streams_of_its_place(place, expected):
    pipeline, data, tensor = place
    assert random_of(ENTRY, SimpleNamespace(pipeline_rank=pipeline, data_rank=data, tensor_rank=tensor)) == expected


def test_older_checkpoints_have_streams_of_replicas():
    entry = {"replicas": [{"random": "first"}, {"random": "second"}]}
    places = [random_of(entry, SimpleNamespace(pipeline_rank=1, data_rank=data, tensor_rank=0)) for data in range(3)]
    assert places == ["first", "second", None]
