"""What `examples.large_batch` found: accuracies of each optimizer, a table of them, a picture and what they say."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from examples.digits import PARTS

SMALL, LARGE = 32, 1024
COLUMNS = ("optimizer", f"{SMALL}", f"{LARGE:,}, scaled rate", f"{LARGE:,}, best rate", "points lost")
WIDTHS = (14, 30, 30, 30, 11)


class Entry(NamedTuple):
    """Accuracies of all seeds at one rate."""

    rate: float
    accuracies: list[float]
    is_last: bool = False  # of the rates on one side, so that a better one may be beyond

    @property
    def mean(self) -> float:
        return mean(self.accuracies)

    def __str__(self) -> str:
        ends = f"{100 * min(self.accuracies):.1f} to {100 * max(self.accuracies):.1f}"
        return f"{100 * self.mean:.1f} ({ends}) at {self.rate:.2g}{'*' if self.is_last else ''}"


class Outcome(NamedTuple):
    """Of one optimizer: with small batches, with large ones at the scaled rate, and with large ones at the best."""

    small: Entry
    scaled: Entry
    tuned: Entry

    @property
    def lost(self) -> float:
        """Percentage points from small batches to large ones."""
        return 100 * (self.small.mean - self.tuned.mean)


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)) + " |"


def head() -> str:
    """The first two rows."""
    return f"{row(*COLUMNS)}\n{row(*('-' * width for width in WIDTHS))}"


def conclusion(outcomes: Mapping[str, Outcome]) -> str:
    """Say which optimizers a large batch costs least, by the numbers."""
    small = max(outcomes, key=lambda arm: outcomes[arm].small.mean)
    large = max(outcomes, key=lambda arm: outcomes[arm].tuned.mean)
    closed = [arm for arm, found in outcomes.items() if found.tuned.mean >= min(found.small.accuracies)]
    rest = sorted((arm for arm in outcomes if arm not in closed), key=lambda arm: outcomes[arm].lost)
    left = ", ".join(f"{arm} {outcomes[arm].lost:.1f}" for arm in rest)
    lines = [
        f"Best with {SMALL}: {small}, {outcomes[small].small.mean:.1%}; with {LARGE:,}: {large}, "
        f"{outcomes[large].tuned.mean:.1%}.",
        f"With the best rate, no worse in the mean with {LARGE:,} than its worst seed with {SMALL}: "
        f"{', '.join(closed) or 'none'}." + (f" Percentage points lost by the others: {left}." if left else ""),
    ]
    if "SGD" in outcomes:
        momentum = outcomes["SGD"].tuned.accuracies
        above = [arm for arm, found in outcomes.items() if min(found.tuned.accuracies) > max(momentum)]
        below = [arm for arm, found in outcomes.items() if max(found.tuned.accuracies) < min(momentum)]
        lines.append(
            f"With {LARGE:,}, better from every seed than SGD with Nesterov's momentum from any: "
            f"{', '.join(above) or 'none'}; worse: {', '.join(below) or 'none'}."
        )
    return "\n".join(lines)


def draw(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Draw the errors of all seeds, and their means."""
    from matplotlib.figure import Figure  # slow to import; without pyplot nothing global changes

    figure = Figure(figsize=(1.2 + 1.1 * len(outcomes), 4), layout="constrained")
    axes = figure.subplots()
    names = (f"{SMALL}", f"{LARGE:,}, scaled rate", f"{LARGE:,}, best rate")
    for i, (name, color) in enumerate(zip(names, ("tab:gray", "tab:orange", "tab:blue"), strict=True)):
        for x, found in enumerate(outcomes.values()):
            errors = [max(100 * (1 - accuracy), 50 / PARTS["test"]) for accuracy in found[i].accuracies]
            place, label = x + 0.25 * (i - 1), name if x == 0 else None
            axes.bar(place, 100 * (1 - found[i].mean), 0.22, color=color, alpha=0.5, label=label)
            axes.plot([place] * len(errors), errors, ".", color="black", markersize=4)
    axes.set_yscale("log")
    axes.set_xticks(range(len(outcomes)), list(outcomes))
    axes.set_ylabel("test errors in percent, a dot a seed")
    axes.legend(title="batch")
    figure.savefig(path, format="png", dpi=110)
