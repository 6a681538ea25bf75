"""What a step logs, on whatever stage and micro-batch, combined into one value for the whole batch on every rank.

While a schedule runs, `self.log` of the LightningModule is replaced by a recorder. Afterwards the ranks exchange one
short vector, and the real `self.log` is called with the combined values on all of them, so that every rank's metrics
are equal and Lightning has nothing left to synchronise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.compat import all_gather_flat
from lightning_hybrid.parallel.pipeline.gates import GateKeeper

REDUCTIONS: dict[Any, str] = {
    "mean": "mean", "avg": "mean", torch.mean: "mean", "sum": "sum", torch.sum: "sum",
    "max": "max", torch.max: "max", max: "max", "min": "min", torch.min: "min", min: "min",
}  # fmt: skip
COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(),
    "max": lambda values: values.max(),
    "min": lambda values: values.min(),
}
KEPT = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")  # flags of self.log that a replay passes on


@dataclass(frozen=True)
class Key:
    """One call of `self.log`, the same in every micro-batch.

    Attributes:
        kind: "log", "metric" (a torchmetrics object) or "output" (an entry of the step's returned dictionary).
        name: Its name.
        occurrence: How often the same step had logged the name before.
        reduction: "mean", "sum", "max" or "min".
        dtype: Data type of the value.
        flags: Keyword arguments for the replay.
    """

    kind: str
    name: str
    occurrence: int = 0
    reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    flags: tuple[tuple[str, Any], ...] = ()


@dataclass
class Entry:
    """Values of one key: weighted terms, added up or compared when they are read."""

    values: list[Tensor]
    weights: list[float]

    def combine(self, reduction: str) -> tuple[Tensor, float]:
        """Float64 (sum of weight times value, weight) for a mean, else (sum, max or min, count)."""
        stacked = torch.stack([value.double() for value in self.values])
        if reduction == "mean":
            weights = torch.tensor(self.weights, dtype=torch.float64, device=stacked.device)
            # a mean over nothing is NaN and must not count
            return (stacked * weights).where(weights > 0, 0.0).sum(), sum(self.weights)
        combined = COMBINE[reduction](stacked)
        return combined, float(len(self.values))


class Recorder:
    """Collects what the module logs during one schedule.

    Args:
        module: The user's module.
        keeper: Knows the run under way; None on a pipeline of one stage.
        device: Where values are kept.
    """

    def __init__(self, module: LightningModule, keeper: GateKeeper | None, device: torch.device) -> None:
        self._module, self._keeper, self._device = module, keeper, device
        self.entries: dict[Key, Entry] = {}
        self._seen: dict[str, int] = {}
        self._samples = 1

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """Record inside the context, which surrounds the user's step for a micro-batch of `samples` samples."""
        self._samples, self._seen = samples, {}
        attributes = vars(self._module)
        before = attributes.get("log")
        attributes["log"] = self._log
        try:
            yield
        finally:
            del attributes["log"]
            if before is not None:
                attributes["log"] = before

    def add(self, key: Key, value: Tensor, weight: float) -> None:
        """Record one value."""
        entry = self.entries.setdefault(key, Entry([], []))
        entry.values.append(value)
        entry.weights.append(weight)

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        occurrence = self._seen[name] = self._seen.get(name, -1) + 1
        run = self._keeper.active if self._keeper else None
        if run is not None and not run.entered:
            return  # an earlier stage records it
        if run is not None and not isinstance(value, Metric):
            run.observe(value, f"self.log({name!r}, ...)")
            if run.is_probe:
                _reduction(name, reduce_fx), _scalar(name, value, self._device)  # where all ranks hear of a mistake
                return
        given = dict(zip(KEPT, (prog_bar, logger, on_step, on_epoch, add_dataloader_idx), strict=True))
        flags = tuple((flag, setting) for flag, setting in given.items() if setting is not None)
        if isinstance(value, Metric):
            attribute = metric_attribute or _attribute_of(self._module, name, value)
            self.add(
                Key("metric", name, occurrence, flags=(*flags, ("metric_attribute", attribute))), _one(self._device), 1
            )
            return
        tensor = _scalar(name, value, self._device)
        key = Key("log", name, occurrence, _reduction(name, reduce_fx), tensor.dtype, flags)
        self.add(key, tensor, float(self._samples if batch_size is None else batch_size))


class Exchange:
    """Combines records over all ranks; remembers which keys exist, so that a step costs one small all-gather.

    Args:
        device: Where collectives run.
        counts: This rank's records count; False where another rank of the tensor axis has made the same ones.
    """

    def __init__(self, device: torch.device, *, counts: bool = True) -> None:
        self._device, self._counts = device, counts
        self._keys: list[Key] = []

    def combine(
        self, entries: Mapping[Key, Entry], sums: Sequence[float], *, prefer: Sequence[int] = ()
    ) -> tuple[dict[Key, tuple[Tensor, float]], list[float]]:
        """Values of all keys that any rank recorded, each with its total weight, and the sums of `sums` over the ranks.

        Every rank of the world must call it, with as many `sums`, which all count. A key that one of the ranks `prefer`
        has recorded is taken from those only.
        """
        local = {key: entry.combine(key.reduction) for key, entry in entries.items() if self._counts}
        while True:
            rows = self._gather(local, sums)
            if not any(row[0] for row in rows.tolist()):
                break
            self._learn(list(local))
        totals = rows[:, 1 : 1 + len(sums)].sum(0).tolist()
        combined = {}
        for index, key in enumerate(self._keys):
            column = 1 + len(sums) + 2 * index
            values, weights = rows[:, column], rows[:, column + 1]
            preferred = weights[list(prefer)]
            if bool((preferred > 0).any()):
                values, weights = values[list(prefer)], preferred
            if bool((weights > 0).any()):
                combined[key] = _over_ranks(key.reduction, values, weights)
        return combined, totals

    def _gather(self, local: dict[Key, tuple[Tensor, float]], sums: Sequence[float]) -> Tensor:
        unknown = float(any(key not in self._keys for key in local))
        row: list[float | Tensor] = [unknown, *sums]
        for key in self._keys:
            row += local.get(key, (0.0, 0.0))
        vector = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self._device).reshape(()) for x in row])
        size = dist.get_world_size()
        if size == 1:
            return vector[None].cpu()
        rows = vector.new_empty(size * len(row))
        all_gather_flat(rows, vector)
        return rows.view(size, len(row)).cpu()  # once; what follows is arithmetic of the host

    def _learn(self, keys: list[Key]) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, keys)
        for key in (key for other in everyone for key in other):
            if key not in self._keys:
                self._keys.append(key)


def replay(module: LightningModule, combined: Mapping[Key, tuple[Tensor, float]]) -> None:
    """Call the real `self.log` for every combined record; nothing in it communicates."""
    for key, (value, weight) in combined.items():
        flags = dict(key.flags)
        if key.kind == "metric":
            metric = module.get_submodule(flags["metric_attribute"])
            module.log(key.name, metric, batch_size=1, **flags)  # type: ignore[arg-type]
        elif key.kind == "log":
            batch_size: Any = int(weight) if weight.is_integer() else weight
            module.log(key.name, value.to(key.dtype), reduce_fx=key.reduction, batch_size=batch_size, **flags)


def outputs(combined: Mapping[Key, tuple[Tensor, float]]) -> dict[str, Tensor]:
    """The combined scalar entries of what the step returned."""
    return {key.name: value.to(key.dtype) for key, (value, _) in combined.items() if key.kind == "output"}


def _over_ranks(reduction: str, values: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    total = float(weights.sum())
    if reduction == "mean":
        return values.sum() / total, total
    return COMBINE[reduction](values[weights > 0]), total


def _reduction(name: str, reduce_fx: Any) -> str:
    try:
        return REDUCTIONS[reduce_fx]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): values of micro-batches and replicas can be combined by "
            "'mean', 'sum', 'max' or 'min' only."
        ) from error


def _scalar(name: str, value: Any, device: torch.device) -> Tensor:
    tensor = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
    if tensor.numel() != 1:
        raise ValueError(f"self.log({name!r}, ...) takes a scalar, got shape {list(tensor.shape)}.")
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.reshape(()).to(device)


def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _attribute_of(module: LightningModule, name: str, metric: Metric) -> str:
    for attribute, other in module.named_modules():
        if other is metric:
            return attribute
    raise ValueError(
        f"self.log({name!r}, metric): the metric is not an attribute of the LightningModule, so ranks cannot agree on "
        "it."
    )
