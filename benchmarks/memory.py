"""Plans of recomputation against their formula and against all plans there are.

``python benchmarks/memory.py`` runs all cases, ``python benchmarks/memory.py CASE`` one of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial

from common import report, run

from lightning_hybrid.functional.recomputation import cheapest_segments, smallest_budget, square_root_segments
from lightning_hybrid.functional.segments import BlockCost, Segment, extra_seconds, peak_bytes

BOUNDARY, INTERNAL = 1, 5  # bytes of a residual block with a hidden layer four times as wide, in those of its input
NUM_DRAWS = 200


def law(num_blocks: int, boundary: int, internal: int) -> int:
    """Fewest bytes of equal blocks in segments that are all recomputed."""
    return min(k * boundary + math.ceil(num_blocks / k) * internal for k in range(1, num_blocks + 1))


def planned(case: str, num_blocks: int) -> None:
    """Bytes of the plan for equal blocks, over the formula, and the least of any plan."""
    costs = [BlockCost(BOUNDARY, INTERNAL, seconds=1.0)] * num_blocks
    needed = peak_bytes(costs, square_root_segments(costs))
    everything = sum(block.kept for block in costs)
    formula = law(num_blocks, BOUNDARY, INTERNAL)
    report(
        case,
        needed / formula,
        1.0,
        share_of_all=needed / everything,
        least_over_formula=smallest_budget(costs) / formula,
    )


def every_plan(start: int, num_blocks: int) -> Iterator[list[Segment]]:
    """All plans of the blocks from one on."""
    if start == num_blocks:
        yield []
    for stop in range(start + 1, num_blocks + 1):
        for rest in every_plan(stop, num_blocks):
            yield [Segment(start, stop, True), *rest]
            if stop == start + 1:
                yield [Segment(start, stop, False), *rest]


def brute_force(case: str) -> None:
    """Share of small random models, budgets and pipelines whose plan takes the time of the best of all plans."""
    draw, equal, slower = random.Random(0), 0, list[float]()
    for _ in range(NUM_DRAWS):
        costs = [
            BlockCost(draw.randint(0, 9), draw.randint(0, 20), draw.randint(0, 9), draw.randint(1, 9))
            for _ in range(draw.randint(1, 7))
        ]
        in_flight = draw.randint(1, 3)
        smallest, everything = smallest_budget(costs, in_flight), in_flight * sum(block.kept for block in costs)
        budget = draw.randint(smallest, max(smallest, everything))
        fitting = [plan for plan in every_plan(0, len(costs)) if peak_bytes(costs, plan, in_flight) <= budget]
        best = min(extra_seconds(costs, plan) for plan in fitting)
        time = extra_seconds(costs, cheapest_segments(costs, budget, in_flight))
        equal += time == best
        slower.append(time - best)
    report(case, equal / NUM_DRAWS, 1.0, at_least=True, most_seconds_more=max(slower))


CASES = {
    **{f"sqrt_law_l{n}": (1, partial(planned, num_blocks=n)) for n in (4, 16, 64, 256)},
    "budget_brute_force": (1, brute_force),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
