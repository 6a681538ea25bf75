"""torchmetrics objects under a pipeline: the last stage sees the predictions, every rank gets the values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hybrid.compat import cached_value, set_cached_value, set_step_value
from lightning_hybrid.functional.trees import map_leaves
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.gates import GateKeeper
from lightning_hybrid.parallel.tensor.parallel import whole_tree
from lightning_hybrid.strategies.records import Key


class MetricObjects:
    """The metrics of one LightningModule, made to synchronise over the data axis and to be broadcast over the pipeline.

    Args:
        module: The user's module; its metrics are changed in place.
        mesh: Groups of this rank.
        keeper: Knows the run under way; None on a pipeline of one stage.

    Raises:
        ValueError: If a metric has `dist_sync_on_step=True`.
    """

    def __init__(self, module: LightningModule, mesh: Mesh, keeper: GateKeeper | None) -> None:
        self._mesh, self._keeper = mesh, keeper
        self._metrics = dict(outermost_metrics(module))
        self._twins: dict[str, Metric] = {}
        self._used: set[str] = set()
        for name, metric in self._metrics.items():
            if metric.dist_sync_on_step:
                raise ValueError(
                    f"{name} has dist_sync_on_step=True, which synchronises inside a micro-batch, where other stages "
                    "do not join. Leave it False: values with on_step=True cover the whole batch of all replicas "
                    "anyway."
                )
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn = _GatherOver(mesh.data_group)
            self._twins[name] = copy.deepcopy(metric)
            metric.register_forward_hook(self._follow(name, metric), with_kwargs=True)
            if mesh.layout.pipeline > 1:
                metric.__dict__["compute"] = self._shared_compute(metric, metric.compute)

    def finish_step(self, combined: Mapping[Key, Any], *, on_step: bool) -> None:
        """After a batch: set the values that metrics logged with `on_step` show; forget stale epoch values.

        Args:
            combined: Records of the batch, equal on all ranks.
            on_step: Default of `self.log` in this step.
        """
        for key in combined:
            flags = dict(key.flags)
            if key.kind == "metric" and flags.get("on_step", on_step):
                name = flags["metric_attribute"]
                twin = self._twins[name]
                value = self._share(twin.compute if twin.update_called else lambda: None)
                set_step_value(self._metrics[name], value)
        for name in self._used:
            self._twins[name].reset()
        self._used.clear()
        for metric in self._metrics.values():
            set_cached_value(metric, None)

    def _follow(self, name: str, metric: Metric) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is not metric:  # a copy of the metric, which has copies of its hooks
                return
            run = self._keeper.active if self._keeper else None
            if run is not None and run.is_probe:
                run.observe((args, kwargs), f"the metric {name}")
            elif run is None or run.entered:
                self._used.add(name)
                args, kwargs = whole_tree((args, kwargs))
                self._twins[name].update(*args, **kwargs)

        return hook

    def _shared_compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        def shared(*args: Any, **kwargs: Any) -> Any:
            if self._keeper is not None and self._keeper.active is not None:
                return compute(*args, **kwargs)  # inside a step, only the stage that runs it is here
            if cached_value(metric) is None:
                set_cached_value(metric, self._share(lambda: compute(*args, **kwargs)))
            return cached_value(metric)

        return shared

    def _share(self, compute: Callable[[], Any]) -> Any:
        """What the last stage computes (with its other replicas), on every rank of the pipeline."""
        mesh = self._mesh
        if mesh.layout.pipeline == 1:
            return compute()
        last = mesh.pipeline_ranks[-1]
        box = [map_leaves(_to(torch.device("cpu")), compute())] if mesh.rank == last else [None]
        dist.broadcast_object_list(box, src=last, group=mesh.pipeline_group)
        return map_leaves(_to(mesh.device), box[0])


class _MetricsTogether(Callback):
    """Progress bars read epoch metrics on rank 0 alone; every rank computes them before that, at the same point."""

    def _compute(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _ = trainer.callback_metrics

    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = _compute


def compute_metrics_together(trainer: Trainer) -> None:
    """Put a callback in front of all others that computes the metrics of an epoch on every rank."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, _MetricsTogether) for callback in callbacks):
        callbacks.insert(0, _MetricsTogether())


class _GatherOver:
    """Gathers states over a group; unlike `Metric.process_group` it lets a metric be copied.

    A list that a replica without samples has left empty takes the type and the dimensions that it has elsewhere.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, state: Tensor, group: object = None) -> list[Tensor]:
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, (state.shape[1:], state.dtype) if state.numel() else None, group=self._group)
        known = next((other for other in everyone if other is not None), None)
        if known is not None and not state.numel():
            state = state.new_empty((0, *known[0]), dtype=known[1])
        return gather_all_tensors(state, self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOver:
        return self


def outermost_metrics(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, Metric]]:
    """Metrics by dotted name, without those inside another metric."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, Metric):
            yield path, child
        else:
            yield from outermost_metrics(child, f"{path}.")


def _to(device: torch.device) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf
