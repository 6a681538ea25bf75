"""Numbers of cycles, beside the schedule that does not count them."""

import math
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from lightning_hybrid.functional.restarts import cycle_of


@pytest.mark.parametrize(("first", "factor"), [(1, 1), (3, 1), (1, 2), (2, 2), (2, 3)])
@pytest.mark.parametrize("part", [None, 0.25])
def test_cycles_begin_where_the_cosine_of_torch_does(first, factor, part):
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    schedule = CosineAnnealingWarmRestarts(optimizer, first, factor)
    cycle, length = 0, first
    for step in range(1, 60):
        epoch = step if part is None else step * part  # as within epochs
        before = schedule.T_cur
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # schedules before the optimizer's first step
            schedule.step() if part is None else schedule.step(epoch)
        if schedule.T_cur <= before:
            cycle, length = cycle + 1, length * factor
        assert cycle_of(schedule.last_epoch, first, factor) == cycle
        assert schedule.T_i == (length if factor > 1 else first)
        angle = math.pi * schedule.T_cur / schedule.T_i
        assert optimizer.param_groups[0]["lr"] == pytest.approx((1 + math.cos(angle)) / 2)  # equation 5
