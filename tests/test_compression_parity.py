"""Lossless compression leaves every bit of a run as it is, alone and beside other techniques."""

import pytest

from lightning_hybrid.callbacks import ActivationCompression, ActivationOffload, ActivationRecompute
from lightning_hybrid.functional.compressing import sum_layers
from tests.launch import run_trainers
from tests.memory_models import NETWORKS, bits
from tests.small import hybrid

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*normalises by the statistics of each micro-batch"),
    pytest.mark.filterwarnings("ignore:ActivationCompression compresses nothing"),  # where blocks are recomputed
]

TECHNIQUES = {
    "compress": lambda: ActivationCompression(min_bytes=0),
    "recompute": lambda: ActivationRecompute(),
    "offload": lambda: ActivationOffload(min_bytes=0),
}
BESIDE = [("recompute",), ("offload",), ("recompute", "offload")]
LAYOUTS = {
    "one": lambda: "auto",
    "ddp": lambda: "ddp",
    "pipeline": lambda: hybrid(2, microbatches=4),
    "zero3": lambda: hybrid(1, microbatches=2, zero_stage=3),
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
NORMALISED = ("AlexNet", "Inception")  # torch normalises responses of 16 bits on an accelerator only


def rows_of(layout, *, is_full):
    """(network, precision, techniques): each network once, by turns, and one beside others; or all."""
    shift = list(LAYOUTS).index(layout)
    if is_full:
        pairs = [(network, precision) for network in NETWORKS for precision in PRECISIONS]
        rows = [(*pair, names) for pair in pairs for names in [(), *BESIDE]]
    else:
        networks = [name for number, name in enumerate(NETWORKS) if number % 2 == shift % 2]
        turns = [PRECISIONS[(number + shift // 2) % 2] for number in range(len(networks))]
        rows = [(network, precision, ()) for network, precision in zip(networks, turns, strict=True)]
        rows.append((*rows[shift % len(rows)][:2], BESIDE[shift % len(BESIDE)]))
    return [row for row in rows if row[1] != "bf16-true" or not row[0].startswith(NORMALISED)]


def outcomes(layout, rows):
    """Of each row, and of a run that keeps everything, what is left, bit by bit; and how this rank's bytes lay."""
    found, codes = {}, {}
    plain = dict.fromkeys((network, precision, None) for network, precision, _ in rows)
    for row in [*plain, *rows]:
        network, precision, beside = row
        callbacks = [] if beside is None else [TECHNIQUES[name]() for name in ("compress", *beside)]
        found[row] = bits(NETWORKS[network], callbacks, LAYOUTS[layout](), precision=precision)
        if callbacks:
            codes[row] = {code for code, number in sum_layers(callbacks[0].layers.values()).after.items() if number}
    return found, codes


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bit_is_that_of_a_run_that_keeps_everything(layout, is_full):
    rows = rows_of(layout, is_full=is_full)
    ranks = run_trainers(1 if layout == "one" else 2, outcomes, layout, rows, timeout=600 if is_full else 120)
    for found, _ in ranks:
        for network, precision, beside in rows:
            assert found[network, precision, beside] == found[network, precision, None], (network, precision, beside)
    for row in rows:
        if "recompute" not in row[-1]:  # which leaves little to compress
            assert set().union(*(codes[row] for _, codes in ranks)) >= {"bits", "argmax", "sparse"}, row
