import random
from itertools import islice, pairwise, product

import pytest

from lightning_hybrid.functional.mixing import cheapest_mix, smallest_mix_budget
from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, Ways, mix_peak_bytes, mix_seconds
from lightning_hybrid.functional.segments import Segment


def every_cut(units, starts):
    """All segments over some units."""
    for cuts in product((False, True), repeat=max(0, len(units) - 1)):
        bounds = [0, *(i for i, is_cut in enumerate(cuts, start=1) if is_cut), len(units)] if units else [0]
        runs = [range(*run) for run in pairwise(bounds)]
        for recomputed in product((False, True), repeat=len(runs)):
            pairs = list(zip(runs, recomputed, strict=True))
            if all(
                not starts & {*run[1:]} and all(units[i].seconds is not None for i in run) if again else len(run) == 1
                for run, again in pairs
            ):
                yield tuple(Segment(run[0], run[-1] + 1, again) for run, again in pairs)


def possible(saved):
    ways = ["kept"]
    ways += ["compressed"] if saved.compressed_bytes is not None else []
    return [*ways, "offloaded"] if saved.offload_seconds is not None else ways


def every_mix(units, starts=frozenset()):
    for segments in every_cut(units, starts):
        parts = []
        for segment in segments:
            for i in range(segment.start, segment.stop):
                unit, first = units[i], segment.recomputed and i == segment.start
                held = [first or (is_saved and not segment.recomputed) for is_saved in unit.is_saved]
                pairs = zip(unit.arguments, held, strict=True)
                parts.append([possible(saved) if is_held else ["dropped"] for saved, is_held in pairs])
                parts.append([["dropped"] if segment.recomputed else possible(saved) for saved in unit.internal])
                parts.append([possible(saved) for saved in unit.after])
        for flat in product(*(ways for part in parts for ways in part)):
            ways = iter(flat)
            filled = [tuple(next(ways) for _ in part) for part in parts]
            yield Mix(segments, tuple(Ways(*filled[i : i + 3]) for i in range(0, len(filled), 3)))


def random_saved(draw):
    sizes, times = draw.choice([None, draw.randint(0, 9)]), draw.choice([None, draw.randint(0, 5)])
    return Saved(draw.randint(0, 9), sizes, draw.randint(0, 4), times)


def random_unit(draw):
    parts = [[], [], []]
    for _ in range(draw.randint(0, 3)):
        draw.choice(parts).append(random_saved(draw))
    arguments, internal, after = map(tuple, parts)
    is_saved = tuple(draw.random() < 0.5 for _ in arguments)
    return Unit(arguments, is_saved, internal, after, draw.choice([None, *(draw.randint(0, 6) for _ in range(3))]))


def random_case(draw):
    units = [random_unit(draw) for _ in range(draw.randint(0, 4))]
    return units, draw.randint(1, 3), frozenset(i for i in range(1, 4) if draw.random() < 0.2)


@pytest.mark.parametrize("seed", range(10))
def test_plans_are_the_best_of_all(seed):
    draw, num_cases = random.Random(seed), 0
    while num_cases < 20:
        units, in_flight, starts = random_case(draw)
        plans = list(islice(every_mix(units, starts), 1001))
        if len(plans) > 1000:
            continue
        num_cases += 1
        values = [(mix_seconds(units, plan), mix_peak_bytes(units, plan, in_flight)) for plan in plans]
        smallest = min(peak for _, peak in values)
        assert smallest_mix_budget(units, in_flight, starts) == smallest
        for budget in {smallest, smallest + draw.randint(0, 10), smallest + draw.randint(0, 30)}:
            plan = cheapest_mix(units, budget, in_flight, starts)
            found = mix_seconds(units, plan), mix_peak_bytes(units, plan, in_flight)
            assert found == min(value for value in values if value[1] <= budget)
        with pytest.raises(ValueError, match=f"at least {smallest} bytes"):
            cheapest_mix(units, smallest - 1, in_flight, starts)
