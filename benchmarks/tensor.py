"""Tensor parallelism: bytes of parameters and of saved activations, and the step time against code written by hand.

``python benchmarks/tensor.py`` runs all cases, ``python benchmarks/tensor.py CASE`` one of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cached_property, partial
from typing import Any, Literal

import torch
from common import compare, fit, report, run, seconds
from lightning.pytorch import LightningModule, seed_everything
from tensor_rivals import GQA, by_dtensor, by_hand
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import MemoryLedger

Mode = bool | Literal["regather"]
WIDTH, HEADS, LENGTH, SAMPLES = 256, 8, 128, 16
BLOCKS = {"*.qkv": "fused_qkv", "*.out": "rowwise", "*.grow": "colwise", "*.shrink": "rowwise"}
LLAMA = {
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), "colwise"),
    **dict.fromkeys(("*.o_proj", "*.down_proj"), "rowwise"),
}


def gpt(depth: int = 8) -> GPT:
    seed_everything(0, verbose=False)
    return GPT(width=WIDTH, depth=depth, heads=HEADS, context=LENGTH)


def texts(number: int) -> list[Tensor]:
    return list(torch.randint(256, (number, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0)))


# Parameters of a rank


def parameters(case: str, t: int) -> None:
    """Bytes of the split parameters on one rank, times the number of ranks, over those of the whole model."""
    whole = {name: parameter.numel() for name, parameter in gpt().named_parameters()}
    module = gpt()
    fit(module, texts(1), devices=t, strategy=HybridPTDPStrategy(1, tensor_parallel_size=t))
    mine = {name: parameter.numel() for name, parameter in module.named_parameters()}
    split = [name for name in whole if mine[name] != whole[name]] if t > 1 else list(whole)
    replicated = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in whole if name not in split})
    value = t * sum(mine[name] for name in split) / sum(whole[name] for name in split)
    more = {"bytes": 4 * sum(mine.values()), "replicated_bytes": 4 * sum(mine[n] for n in whole if n not in split)}
    report(case, value, 1.0, **more, replicated=replicated)


# Saved activations of a block


def block_bytes(t: int, mode: Mode) -> float:
    """What a block of the GPT saves, in float32, without dropout and with an attention that saves no scores.

    In units of samples x length x width: inputs of the two norms (2) and of the two first matrices (2); queries, keys
    and values (3), the mixture (1), and the input and output of the activation function (4 each), 12 that are always
    split. Besides two numbers a token for each norm, and one for each head.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.1: 34 bytes at 2 bytes a number are those 16 numbers
    and two masks of dropout, and 5 x heads x length / width bytes are the scores.
    """
    tokens = SAMPLES * LENGTH
    between, inputs = (2 / t if mode else 2), (2 / t if mode == "regather" else 2)
    statistics = 4 * tokens / (t if mode else 1) + tokens * HEADS / t
    return 4 * (tokens * WIDTH * (between + inputs + 12 / t) + statistics)


def saved(case: str, t: int, mode: Mode = False) -> None:
    """Measured over that formula."""
    ledger = MemoryLedger()
    options: dict[str, Any] = {"tensor_parallel_size": t, "sequence_parallel": mode} if t > 1 else {}
    strategy = HybridPTDPStrategy(1, num_microbatches=1, zero_stage=0, **options)
    with redirect_stdout(io.StringIO()):  # the ledger's table
        fit(gpt(depth=4), texts(1), devices=t, strategy=strategy, callbacks=[ledger])
    activations = ledger.last.activations.items()
    measured = sum(number for name, number in activations if f"{name}.".startswith("blocks.2."))
    share = measured / block_bytes(1, mode=False)
    report(case, measured / block_bytes(t, mode), 1.01, bytes=measured, formula=block_bytes(t, mode), of_whole=share)


# Steps against the same written by hand


class Raced(HybridPTDPStrategy):
    """Times each of its steps, forward and backward, beside one of a rival on the same batch.

    Args:
        make_rival: Makes a module whose call gives the loss of a batch.
        plan: Of our own.
    """

    def __init__(self, make_rival: Callable[[], nn.Module], plan: dict[str, str]) -> None:
        size = 2
        super().__init__(
            1, tensor_parallel_size=size, tensor_parallel_plan=plan, num_microbatches=1, zero_stage=0
        )  # one micro-batch: the rival has no more
        self.rows: list[list[float]] = []
        self.make_rival = make_rival

    @cached_property
    def rival(self) -> nn.Module:
        """Made when there is a process group."""
        return self.make_rival()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.rival.zero_grad()
        outputs = []
        ours = partial(seconds, lambda: outputs.append(super(Raced, self).training_step(batch, batch_idx)))
        theirs = partial(seconds, lambda: self.rival(batch).backward())
        self.rows.append([ours(), theirs()] if batch_idx % 2 else [theirs(), ours()][::-1])
        if batch_idx == 0:
            self._check()
        return outputs[0]

    def _check(self) -> None:
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        for parameter, gradient in self._training.taken:
            theirs = self.rival.get_parameter(names[id(parameter)]).grad
            assert_close(gradient, theirs.to_local() if isinstance(theirs, DTensor) else theirs)


def against(
    case: str,
    make: Callable[[], LightningModule],
    rival: Callable[[Any], nn.Module],
    plan: dict[str, str],
    target: float,
    name: str,
    num_steps: int = 60,
) -> None:
    strategy = Raced(lambda: rival(make()), plan)
    fit(make(), texts(num_steps), devices=2, strategy=strategy)
    compare(case, strategy.rows, target, ("ours_s", name))


def llama() -> GQA:
    seed_everything(0, verbose=False)
    return GQA(width=WIDTH, depth=8, heads=HEADS, pairs=HEADS // 2)


CASES: dict[str, tuple[int, Callable[[str], None]]] = {  # name: (number of ranks, what each runs)
    **{f"parameters_t{t}": (t, partial(parameters, t=t)) for t in (1, 2, 4)},
    "saved_t1": (1, partial(saved, t=1)),
    **{f"saved_t{t}": (t, partial(saved, t=t)) for t in (2, 4)},
    **{f"saved_t{t}_sequence": (t, partial(saved, t=t, mode=True)) for t in (2, 4)},
    **{f"saved_t{t}_regather": (t, partial(saved, t=t, mode="regather")) for t in (2, 4)},
    "by_hand_t2": (2, partial(against, make=gpt, rival=by_hand, plan=BLOCKS, target=1.10, name="by_hand_s")),
    "dtensor_t2": (2, partial(against, make=llama, rival=by_dtensor, plan=LLAMA, target=1.0, name="dtensor_s")),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
