"""The sum of what each rank owns, as `fully_shard` asks for it on the host."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from lightning_hybrid.parallel.zero.summing import SumByExchange
from tests.launch import run_ranks

NUM_RANKS, LENGTH = 3, 5


def parts_of(rank, dtype):
    return torch.randn(NUM_RANKS * LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sum_all(dtypes):
    found = []
    for dtype in dtypes:
        scatter, mine = SumByExchange(), parts_of(dist.get_rank(), dtype)
        given = mine.clone()
        out = scatter.allocate((LENGTH,), dtype=dtype, device=mine.device)
        scatter(output_tensor=out, input_tensor=given, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
        assert torch.equal(given, mine)
        found.append(out)
    with pytest.raises(AssertionError, match="combined by"):
        scatter(out, mine, dist.group.WORLD, dist.ReduceOp.MAX)
    return found


def test_each_rank_has_the_sum_of_its_parts_rounded_once():
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    for rank, sums in enumerate(run_ranks(NUM_RANKS, sum_all, dtypes)):
        for dtype, found in zip(dtypes, sums, strict=True):
            own = slice(rank * LENGTH, (rank + 1) * LENGTH)
            exact = sum(parts_of(other, dtype).double()[own] for other in range(NUM_RANKS))
            if dtype.itemsize == 2:
                assert torch.equal(found, exact.to(dtype))
            else:
                assert_close(found, exact.to(dtype), rtol=0, atol=8 * torch.finfo(dtype).eps)  # terms are below 4
