"""Partitions by cost, as a user meets them: the plan that is printed, and training with it."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid import measure_costs
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader, weights


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow, self.shrink = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

    def forward(self, x):
        return self.shrink(self.grow(x).tanh())


class HeavyHead(Small):
    """The head has ten times a block's parameters."""

    def __init__(self):
        super().__init__()
        self.tail = Tail().double()

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.tail(x))


class Plans(logging.Handler):
    """Keeps the tables that are printed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        if "slowest" in record.getMessage():
            self.seen.append(record.getMessage())


def planned(cases):
    logger, plans, states = logging.getLogger("lightning.pytorch"), Plans(), []
    logger.addHandler(plans)
    logger.setLevel(logging.INFO)
    for options in cases:
        module, given = HeavyHead(), dict(options)
        if given.get("block_costs") == "measured":
            given["block_costs"] = measure_costs(module, next(iter(loader(4, 4))), num_runs=1)
        elif "block_costs" in given and dist.get_rank():
            given["block_costs"] = given["block_costs"][::-1]  # measured by each rank for itself
        states.append(weights(fit(module, loader(8, 4), hybrid(**given))))
    logger.removeHandler(plans)
    return plans.seen, states


CASES = {  # options: blocks of each stage
    "by parameters": ({}, [5, 1]),
    "by given costs": ({"block_costs": [9, 1, 1, 1, 1, 1]}, [1, 5]),
    "measured": ({"block_costs": "measured"}, None),
    "by costs, with chunks": ({"block_costs": [1, 1, 1, 1, 1, 9], "chunks": 2}, [2, 2, 1, 1]),
    "within memory": ({"block_costs": [1, 1, 1, 1, 1, 1], "max_stage_memory": 3600}, [5, 1]),
}


@pytest.fixture(scope="module")
def outcomes():
    return run_trainers(2, planned, [options for options, _ in CASES.values()])


def test_the_plan_is_printed_once_and_is_rank_0s(outcomes):
    (tables, _), (silent, _) = outcomes
    assert silent == []
    assert len(tables) == len(CASES)
    for table, (options, sizes) in zip(tables, CASES.values(), strict=True):
        rows = [line.split() for line in table.splitlines()[1:-1]]
        found = [(int(row[4][7:]) if row[3] == "to" else int(row[2][7:])) - int(row[2][7:]) + 1 for row in rows]
        assert found == sizes or (sizes is None and sum(found) == 6)
        assert [row[1] for row in rows] == ["0", "1"] * options.get("chunks", 1)
        assert ("given" in table) == ("block_costs" in options)
    assert tables[0].splitlines()[-1].startswith("slowest: stage 1, 1.")


def test_every_partition_trains_as_one_process_does(outcomes):
    expected = dict(weights(fit(HeavyHead(), loader(8, 4))))
    for state in outcomes[0][1]:
        torch.testing.assert_close(state, expected)
