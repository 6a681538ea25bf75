"""Factors of rates against what they are said to be, and against torch's own warm-up."""

import pytest
import torch

from lightning_hybrid.functional.rates import (
    linear_scale,
    sqrt_scale,
    steps_of_epochs,
    warmup_progress,
    warmup_value,
)


def test_scales_are_the_ratio_and_its_root():
    assert [linear_scale(ratio) for ratio in (0.25, 1.0, 16.0)] == [0.25, 1.0, 16.0]
    assert [sqrt_scale(ratio) for ratio in (0.25, 1.0, 16.0)] == [0.5, 1.0, 4.0]


@pytest.mark.parametrize(("start", "total"), [(0.25, 4), (0.1, 7), (1 / 3, 1)])
def test_warmup_is_that_of_torch_step_by_step(start, total):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start, 1.0, total)
    for step in range(total + 3):
        factor = warmup_value(start, 1.0, warmup_progress(step, total))
        assert factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-14)  # torch multiplies step by step
        assert step < total or factor == 1
        optimizer.step()
        schedule.step()


def test_steps_of_epochs_count_short_windows_and_each_epochs_accumulation():
    assert steps_of_epochs(2, 10, lambda epoch: 4) == 6
    assert steps_of_epochs(1.5, 10, lambda epoch: 1) == 15
    assert steps_of_epochs(2.5, 10, lambda epoch: epoch + 1) == 10 + 5 + 2
    assert steps_of_epochs(0.01, 10, lambda epoch: 1) == 1
