import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.strategies.reductions import reduce_over_data
from tests.launch import run_ranks

MEANS = dict.fromkeys(("mean", "avg", "AVG", "Mean", None), 5.5)
OPERATIONS = {**MEANS, "sum": 11, "SUM": 11, "max": 10, "min": 1, "product": 10}  # of 1 and 10


def reduced():
    rank = dist.get_rank()
    value = torch.tensor([10.0**rank], requires_grad=True)
    found = {name: reduce_over_data(value, None, name).tolist() for name in OPERATIONS}
    enums = {
        op: reduce_over_data(value, None, getattr(dist.ReduceOp, op)).tolist() for op in ("AVG", "SUM", "MAX", "MIN")
    }
    alone = [dist.new_group([r]) for r in range(2)][rank]
    kinds = {}
    for dtype in (torch.int64, torch.bfloat16, torch.bool, torch.complex64):
        result = reduce_over_data(torch.tensor(rank + 1).to(dtype), None, "mean")
        kinds[str(dtype)] = result.item(), str(result.dtype)
    whole = reduce_over_data(torch.tensor(rank + 1), None, "sum")
    return {
        "names": found,
        "enums": enums,
        "kinds": kinds,
        "whole": (whole.item(), whole.dtype),
        "alone": reduce_over_data(value, alone, "sum").item(),
        "untouched": value.item() == 10**rank and not reduce_over_data(value, None, "sum").requires_grad,
        "others": reduce_over_data([1, "text"], None, "sum"),
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, reduced)


def test_operations_go_by_name_or_by_torchs_own(results):
    for result in results:
        assert result["names"] == {name: [value] for name, value in OPERATIONS.items()}
        assert result["enums"] == {"AVG": [5.5], "SUM": [11], "MAX": [10], "MIN": [1]}


def test_whole_numbers_have_a_fractional_mean_and_a_whole_sum(results):
    for result in results:
        assert result["kinds"] == {
            "torch.int64": (1.5, "torch.float64"),
            "torch.bfloat16": (1.5, "torch.bfloat16"),
            "torch.bool": (1.0, "torch.float64"),
            "torch.complex64": (1.5, "torch.complex64"),
        }
        assert result["whole"] == (3, torch.int64)


def test_the_argument_stays_the_group_decides_and_other_things_pass(results):
    assert [result["alone"] for result in results] == [1, 10]
    assert all(result["untouched"] for result in results)
    assert all(result["others"] == [1, "text"] for result in results)
