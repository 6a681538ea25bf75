"""RMSprop that becomes momentum SGD: the start of training that very large batches need."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_hybrid.compat import foreach
from lightning_hybrid.functional.transitions import literal_transition_weight, transition_weight
from lightning_hybrid.optim.arguments import check_at_least, check_fraction, check_range
from lightning_hybrid.optim.base import Member, Update, WholeTensorOptimizer, advance

CURVE = ("steps_per_epoch", "center", "period", "literal")
LEAP = 5.0  # from one rate to the next
CACHED = 2**18  # bytes of parameters


class RMSpropToSGD(WholeTensorOptimizer):
    """RMSprop at first, momentum SGD in the end, and between them a sum of both.

    With the share a of SGD, which grows with the epoch (see `transition_weight`), the step is::

        m = rms_decay m + (1 - rms_decay) g^2
        r = (1 - a) rms_lr / lr
        d = momentum d - (a + r / (sqrt(m) + eps)) g
        w = w + lr d

    It works element by element, and so on any shard.

    RMSprop's rate is its own: `lr` is that of SGD. Since r divides by `lr`, a step with `lr` 0 counts r as 0 and
    moves nothing; it still takes the gradient into m, and its share a into d. Past steps in d, those of RMSprop
    too, go with the present `lr`: where that grows tenfold from one step to the next, so do they. Let warm-ups grow
    evenly.

    Args:
        params: Parameters or groups.
        lr: Rate of SGD.
        steps_per_epoch: Optimizer steps of an epoch, above 0; need not be a whole number. Epochs are counted for each
            parameter, in steps in which it had a gradient.
        center: Epochs after which a is one half.
        period: Epochs: half of it after the center, a is 1. Above 0.
        momentum: From 0 to below 1.
        rms_decay: From 0 to below 1.
        rms_lr: Rate of RMSprop.
        eps: Above 0.
        weight_decay: Factor of w that is added to g first.
        literal: Take a as it circulates, see `literal_transition_weight`: for a quarter of the period it is above 1,
            so that r is negative and RMSprop's part goes uphill. Nothing is limited.

    Attributes:
        last_share: a of the last step, to be logged; None before the first.

    Raises:
        ValueError: If an option is outside its range.

    Source: Akiba, Suzuki and Fukuda, Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet in 15 Minutes
        (2017), arXiv:1711.04325; the defaults are its constants. Ours: weight decay, and a line of half the slope.
    """

    is_elementwise = True
    last_share: float | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        steps_per_epoch: float,
        center: float = 10.0,
        period: float = 5.0,
        momentum: float = 0.9,
        rms_decay: float = 0.99,
        rms_lr: float = 3e-4,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        literal: bool = False,
    ) -> None:
        self._rates, self._has_warned = dict[int, float](), False
        check_at_least(self, 0, lr=lr, center=center, rms_lr=rms_lr, weight_decay=weight_decay)
        check_fraction(self, momentum=momentum, rms_decay=rms_decay)
        for name, value in {"steps_per_epoch": steps_per_epoch, "period": period, "eps": eps}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"RMSpropToSGD({name}={value!r}) must be a finite number above 0.")
        defaults = {"lr": lr, "steps_per_epoch": steps_per_epoch, "center": center, "period": period}
        defaults |= {"momentum": momentum, "rms_decay": rms_decay, "rms_lr": rms_lr, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, "literal": literal})

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rates, self._has_warned = dict[int, float](), False

    @override
    def update(self, group: dict[str, Any], members: Sequence[Member]) -> Update:
        """As `WholeTensorOptimizer` says; there is nothing to sum."""
        check_range(self, members[0].data.dtype)
        self._watch_rate(group)
        curve = literal_transition_weight if group["literal"] else transition_weight
        by_count: dict[float, list[Member]] = {}
        for member, step in zip(members, advance(members), strict=True):
            by_count.setdefault(step - 1, []).append(member)
        on_cpu = members[0].data.device.type == "cpu"
        for count, alike in by_count.items():
            self.last_share = share = curve(count / group["steps_per_epoch"], group["center"], group["period"])
            for together in cacheable(alike) if on_cpu else [alike]:
                _move(group, together, share)
        yield from ()

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's, with a warning if a saved curve counts in the place of this one's."""
        own = [[group[name] for name in CURVE] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for before, group in zip(own, self.param_groups, strict=True):
            saved = [group[name] for name in CURVE]
            if saved != before:
                text = ", ".join(f"{name}={old!r}" for name, old in zip(CURVE, saved, strict=True))
                warnings.warn(f"The saved {text} of RMSpropToSGD count, and {before} do not.", stacklevel=2)

    def _watch_rate(self, group: dict[str, Any]) -> None:
        """Warn once where the rate leaps while RMSprop's past steps, which go with it, are in the buffers."""
        now, share = float(group["lr"]), self.last_share
        before, self._rates[id(group)] = self._rates.get(id(group), 0.0), now
        if 0 < before * LEAP < now and share is not None and share < 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The lr of RMSpropToSGD went from {before:.3g} to {now:.3g} in one step, and so did what its momentum "
                "has of RMSprop's steps, which may diverge. Let a warm-up of n steps begin at 1/n: "
                "LinearLR(optimizer, start_factor=1 / n, total_iters=n).",
                stacklevel=2,
            )


def cacheable(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Parameters that are as large together as what a CPU's cache holds of all that a step reads; or single ones."""
    together: list[Member] = []
    for member in members:
        if together and sum(each.data.nbytes for each in (*together, member)) > CACHED:
            yield together
            together = []
        together.append(member)
    yield together


def _move(group: dict[str, Any], members: Sequence[Member], share: float) -> None:
    """One step of parameters of which SGD has the same share."""
    lr = float(group["lr"])
    data, gradients = [member.data for member in members], [member.gradient for member in members]
    squares, buffers = ([member.entry(name) for member in members] for name in ("square_avg", "momentum_buffer"))
    if group["weight_decay"]:
        gradients = foreach("add")(gradients, data, alpha=group["weight_decay"])
    foreach("mul_")(squares, group["rms_decay"])
    foreach("addcmul_")(squares, gradients, gradients, value=1 - group["rms_decay"])
    foreach("mul_")(buffers, group["momentum"])
    foreach("add_")(buffers, gradients, alpha=-share)
    if not lr:
        return
    ratio = (1 - share) * group["rms_lr"] / lr
    if ratio:
        divisors = foreach("sqrt")(squares)
        foreach("add_")(divisors, group["eps"])
        foreach("addcdiv_")(buffers, gradients, divisors, value=-ratio)
    foreach("add_")(data, buffers, alpha=lr)
