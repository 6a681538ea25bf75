"""The user's hooks under a pipeline: they see what the last stage gathered, and what they log is equal on every rank.

A hook such as `on_validation_epoch_end` runs on every rank, but only the last stage has run the code behind the last
block: the lists and numbers that steps left on the LightningModule are therefore copied from it first. What a hook logs
is taken from the last stage too, and combined over the replicas.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_hybrid.functional.trees import map_leaves
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.pipeline.frozen import CONTAINERS, SIMPLE, Frozen
from lightning_hybrid.parallel.pipeline.snapshot import plain_attributes
from lightning_hybrid.parallel.tensor.parallel import whole_tree
from lightning_hybrid.strategies.clipping import NormWatch
from lightning_hybrid.strategies.records import Exchange, Recorder, replay

STAGES = ("train", "validation", "test")
LOGGING = (
    *(f"on_{s}_{m}" for s in STAGES for m in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end")),
    *("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step"),
    "configure_gradient_clipping",
)
RARE = frozenset(f"on_{s}_{m}" for s in STAGES for m in ("start", "epoch_start", "epoch_end", "end"))
LIGHTNINGS = frozenset(vars(LightningModule()))  # attributes that every module has
WITH_GRADIENTS = frozenset({"on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"})
GATHERING = tuple(f"on_{s}_{m}" for s in STAGES for m in ("epoch_end", "end"))


class SharedHooks:
    """Wraps the hooks that a LightningModule overrides.

    Args:
        module: The user's module.
        engine: Its engine.

    Attributes:
        norm_watch: Warns where hooks take norms of gradients.
    """

    def __init__(self, module: LightningModule, engine: Engine) -> None:
        self._module, self._engine = module, engine
        mesh = engine.mesh
        self._last = [mesh.layout.rank(mesh.layout.pipeline - 1, d) for d in range(mesh.layout.data)]
        self._exchanges: dict[str, Exchange] = {}
        self.norm_watch = NormWatch()
        self._baseline = self._copies()
        self._wrapped: list[str] = []

    def install(self) -> None:
        """Wrap the hooks until `remove`."""
        for name in dict.fromkeys(LOGGING + GATHERING):
            if is_overridden(name, self._module) and name not in self._wrapped:
                vars(self._module)[name] = self._wrap(name, getattr(self._module, name))
                self._wrapped.append(name)

    def remove(self) -> None:
        """Give the module its own hooks back."""
        for name in self._wrapped:
            vars(self._module).pop(name, None)
        self._wrapped.clear()

    def _wrap(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        mesh = self._engine.mesh
        exchange = self._exchanges.setdefault(name, Exchange(mesh.device, counts=mesh.tensor_rank == 0))

        @functools.wraps(hook)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name in GATHERING:
                self._copy_from_last_stage()
            if name not in LOGGING or "log" in vars(
                self._module
            ):  # in a hook that calls another, the outer one records
                return hook(*args, **kwargs)
            recorder = Recorder(self._module, None, self._engine.mesh.device)
            # between the start and the end of a batch, what is logged counts by the batch's samples
            with recorder.recording(1 if name in RARE else self._engine.num_samples), self._watching(name):
                result = hook(*args, **kwargs)
            combined, _ = exchange.combine(recorder.entries, [], prefer=self._last)
            replay(self._module, combined)
            if name in GATHERING:
                self._baseline = self._copies()
            return result

        return wrapped

    def _watching(self, name: str) -> AbstractContextManager[Any]:
        if name not in WITH_GRADIENTS or not self._engine.is_partial:
            return nullcontext()
        self.norm_watch.hook = name
        return self.norm_watch

    def _copies(self) -> dict[str, Frozen]:
        return {name: Frozen(value) for name, value in self._shareable().items()}

    def _shareable(self) -> dict[str, Any]:
        kinds = (*CONTAINERS, *SIMPLE, Tensor)
        absent = self._engine.stand_ins  # of parameters of the module itself, which another stage has
        own = {name: value for name, value in plain_attributes(self._module).items() if name not in absent}
        return {name: value for name, value in own.items() if name not in LIGHTNINGS and isinstance(value, kinds)}

    def _copy_from_last_stage(self) -> None:
        mesh = self._engine.mesh
        if mesh.layout.pipeline == 1:
            return
        box: list[Any] = [None]
        if self._engine.mesh.is_last:
            box = [
                {name: _packed(value) for name, value in self._shareable().items() if self._has_changed(name, value)}
            ]
        dist.broadcast_object_list(box, src=mesh.pipeline_ranks[-1], group=mesh.pipeline_group)
        for name, packed in box[0].items():
            if packed is None:
                raise RuntimeError(
                    f"self.{name} was changed by a step on the last pipeline stage and cannot be pickled, so that the "
                    "other ranks cannot run the hooks that read it. Keep tensors, numbers and strings in it."
                )
            if not self._engine.mesh.is_last:
                self._set(name, map_leaves(self._to_device, pickle.loads(packed)))

    def _has_changed(self, name: str, value: Any) -> bool:
        return name not in self._baseline or self._baseline[name].differs(value)

    def _set(self, name: str, value: Any) -> None:
        held = vars(self._module).get(name)
        if isinstance(held, list) and isinstance(value, list):
            held[:] = value  # others may hold the same list
        elif isinstance(held, dict) and isinstance(value, dict):
            held.clear()
            held.update(value)
        else:
            setattr(self._module, name, value)

    def _to_device(self, leaf: Any) -> Any:
        return leaf.tensor.to(self._engine.mesh.device) if isinstance(leaf, _OnDevice) else leaf


@dataclass
class _OnDevice:
    """A tensor in host memory that was on the device, and is to be there again."""

    tensor: Tensor


def _pack_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach() if leaf.device.type == "cpu" else _OnDevice(leaf.detach().cpu())


def _packed(value: Any) -> bytes | None:
    """Pickled, with tensors detached and in host memory; None if that is impossible."""
    try:
        return pickle.dumps(map_leaves(_pack_leaf, whole_tree(value)))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
