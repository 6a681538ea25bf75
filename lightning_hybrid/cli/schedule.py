"""``lightning-hybrid schedule``: draw a pipeline schedule and tell its bubble, before any GPU is rented."""

import argparse
import json
import shutil
from pathlib import Path

from lightning_hybrid.functional.drawing import LEGEND, chrome_trace, text_grid, timeline_png
from lightning_hybrid.functional.lowering import lower
from lightning_hybrid.functional.schedules import choose
from lightning_hybrid.functional.simulation import (
    Simulation,
    simulate,
    theoretical_bubble_ratio,
    theoretical_bubble_share,
)

_NAMES = {"interleaved": "interleaved_1f1b"}  # short forms of the strategy's names


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments behind ``lightning-hybrid schedule``; None: those of the process.

    Returns:
        Exit status, 0. Arguments that cannot work end the process with status 2, as argparse does.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        schedule = choose(_NAMES.get(args.schedule, args.schedule), args.pipeline, args.micro_batches, args.chunks)
        simulation = simulate(
            lower(schedule, args.pipeline * args.chunks),
            forward_time=args.forward_time / args.chunks,
            backward_time=args.backward_time / args.chunks,
            transfer_time=args.transfer_time,
        )
        grid = text_grid(simulation.events, width=args.width or shutil.get_terminal_size((120, 24)).columns)
    except ValueError as error:
        parser.error(str(error))
    print(grid, LEGEND, sep="\n\n", end="\n\n")
    if args.schedule != "gpipe" and args.chunks > 1 and args.micro_batches % args.pipeline:
        print(f"order: GPipe's, since {args.micro_batches} micro-batches are no multiple of {args.pipeline} ranks")
    print(_numbers(simulation, args.pipeline, args.micro_batches, args.chunks))
    if args.png:
        title = (
            f"{args.schedule}: {args.pipeline} ranks, {args.micro_batches} micro-batches, {args.chunks} chunks a rank"
        )
        timeline_png(simulation.events, args.png, title=title)
    if args.trace:
        args.trace.write_text(json.dumps(chrome_trace(simulation.events)))
    return 0


def _numbers(simulation: Simulation, p: int, m: int, v: int) -> str:
    share, ratio = simulation.bubble_share, simulation.bubble_ratio
    theory = theoretical_bubble_share(p, m, v), theoretical_bubble_ratio(p, m, v)
    return "\n".join(
        [
            f"end time:                  {simulation.end_time:g}",
            f"bubble share of total:     {share:.4f} simulated, {theory[0]:.4f} with equal stages, free transfers",
            f"bubble ratio to computing: {ratio:.4f} simulated, {theory[1]:.4f} with equal stages, free transfers",
            f"peak in flight per rank:   {simulation.peak_in_flight} micro-batches" + (" of a chunk" if v > 1 else ""),
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-hybrid schedule", description="Draw a pipeline schedule.")
    add = parser.add_argument
    add("--pipeline", type=int, default=4, metavar="P", help="pipeline ranks (default: %(default)s)")
    add("--micro-batches", type=int, default=8, metavar="M", help="micro-batches a step (default: %(default)s)")
    add("--chunks", type=int, default=1, metavar="V", help="chunks a rank (default: %(default)s)")
    names = ("auto", "gpipe", "1f1b", "interleaved_1f1b", *_NAMES)
    short = "interleaved is short for interleaved_1f1b"
    add("--schedule", choices=names, default="auto", help=f"order of the actions; {short} (default: %(default)s)")
    per_rank = "of all layers of a rank, whatever the number of chunks (default: %(default)s)"
    add("--forward-time", type=float, default=1.0, metavar="T", help=f"forward time of a micro-batch {per_rank}")
    add("--backward-time", type=float, default=2.0, metavar="T", help=f"backward time of a micro-batch {per_rank}")
    add("--transfer-time", type=float, default=0.0, metavar="T", help="time of one payload (default: %(default)s)")
    add("--width", type=int, metavar="N", help="characters a line (default: the terminal's)")
    add("--png", type=Path, metavar="FILE", help="draw a timeline, too")
    add("--trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev, too")
    return parser
