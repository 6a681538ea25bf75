"""Steps of optimizers against those of torch's AdamW, and what they keep: all take turns in one process.

``python benchmarks/optimizers.py`` runs all cases, ``python benchmarks/optimizers.py CASE`` one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from common import compare, report, run, seconds
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from examples.gpt import GPT
from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars, RMSpropToSGD

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROUNDS = 50
TIME, STATES = 1.3, 0.05  # targets
GPT2 = {"width": 768, "vocabulary": 50257} if DEVICE == "cuda" else {"width": 256, "vocabulary": 16384}

Make = Callable[[Iterable[Parameter]], Optimizer]
Shapes = Sequence[Sequence[int]]

RIVAL: Make = partial(AdamW, lr=1e-3, weight_decay=0.01, foreach=True)
OURS: dict[str, Make] = {  # RMSpropToSGD in its first epoch, when both work
    "lars": partial(Lars, lr=0.1, weight_decay=0.01),
    "lamb": partial(Lamb, lr=1e-3, weight_decay=0.01),
    "adafactor": partial(Adafactor, lr=1e-2, weight_decay=0.01),
    "sm3": partial(SM3, lr=0.1, weight_decay=0.01),
    "rmsprop_to_sgd": partial(RMSpropToSGD, lr=0.1, weight_decay=0.01, steps_per_epoch=NUM_ROUNDS),
    "sm3_momentum": partial(SM3, lr=0.1, momentum=0.9, weight_decay=0.01),
}
SMALL = ("adafactor", "sm3")  # of states
CONTEXT: dict[str, Make] = {"sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True)}


def example() -> Shapes:
    """Of the example's GPT, with 1 million parameters."""
    return [p.shape for p in GPT().parameters()]


def gpt2(width: int, vocabulary: int, depth: int = 12) -> Shapes:
    """As of GPT-2, biases included: 14 million parameters, or 124 million on a GPU."""
    norm = [(width,), (width,)]
    linears = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = [*norm, *norm, *linears, *((outputs,) for outputs, _ in linears)]
    return [(vocabulary, width), (1024, width), *(block * depth), *norm]


class Stepping:
    """An optimizer with parameters and gradients of its own, the same for each.

    Args:
        make: Makes the optimizer.
        shapes: Of the parameters.
    """

    def __init__(self, make: Make, shapes: Shapes) -> None:
        generator = torch.Generator().manual_seed(0)
        parameters = [Parameter(torch.randn(*shape, generator=generator).to(DEVICE)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = (0.01 * torch.randn(*parameter.shape, generator=generator)).to(DEVICE)
        self.optimizer = make(parameters)

    def step(self) -> None:
        """Make one, and wait until it is done."""
        self.optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def state_bytes(self) -> float:
        """Of all that is kept, counts of steps included."""
        tensors = (value for state in self.optimizer.state.values() for value in state.values())
        return float(sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)))


def steps(case: str, shapes: Callable[[], Shapes]) -> None:
    """Times of steps over those of AdamW; all take turns, in changing order."""
    steppings = {name: Stepping(make, shapes()) for name, make in {"adamw": RIVAL, **OURS, **CONTEXT}.items()}
    rounds = []
    for i in range(NUM_ROUNDS):
        order = list(steppings.items())[:: 1 if i % 2 else -1]
        rounds.append({name: seconds(stepping.step) for name, stepping in order})
    for name in (*OURS, *CONTEXT):
        compare(f"{case}_{name}", [[times[name], times["adamw"]] for times in rounds], TIME, (f"{name}_s", "adamw_s"))


def states(case: str) -> None:
    """Bytes of states after a step over those of AdamW, of the example's GPT."""
    adamw = Stepping(RIVAL, example())
    adamw.step()
    for name in SMALL:
        ours = Stepping(OURS[name], example())
        ours.step()
        sizes = {f"{name}_bytes": ours.state_bytes(), "adamw_bytes": adamw.state_bytes()}
        report(f"{case}_{name}", ours.state_bytes() / adamw.state_bytes(), STATES, **sizes)


CASES: dict[str, tuple[int, Callable[[str], None]]] = {
    "gpt": (1, partial(steps, shapes=example)),
    "gpt2": (1, partial(steps, shapes=partial(gpt2, **GPT2))),
    "states": (1, states),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
