"""What metrics of the loss around the parameters have in common: what they keep, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import isfinite
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import Metric
from typing_extensions import override

from lightning_hybrid.functional.trees import map_leaves
from lightning_hybrid.parallel.loss_surface import LossSurface, Term, measured_parameters

ALONE = (
    "Measure a checkpoint in one process: module = MyModule.load_from_checkpoint(path).eval(), then "
    "metric.update(module, loss, batch) and metric.compute()."
)


class SurfaceMetric(Metric):
    """Keeps losses until `compute` measures the surface of their mean over all batches and ranks.

    The ranks measure together, in `compute`: they may have different numbers of batches, but each at least one.

    Args:
        kwargs: Of `torchmetrics.Metric`. With `sync_on_compute=False` each rank measures its own batches.
    """

    higher_is_better = False
    is_differentiable = False
    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._terms: list[Term] = []
        self._measured: list[nn.Module] = []  # a list, for it is no submodule

    @override
    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"Call {type(self).__name__}.update, and give self.log the metric itself or what compute returns: it has "
            "no value for each batch."
        )

    @override
    def update(self, module: nn.Module, closure: Callable[..., Tensor], *inputs: Any, weight: float = 1.0) -> None:
        """Add a batch.

        Args:
            module: Whose parameters are moved, those that need gradients; the same at each call.
            closure: Returns the mean loss of the batch, a tensor of one number, called with `inputs`. It is kept until
                `reset`, and called many times in `compute`: it must not log, step or draw random numbers.
            inputs: Such as the batch. Tensors made in inference mode, as Lightning's evaluation makes them, are copied,
                which cannot be done for those that a closure has without being given them.
            weight: How much the batch counts; number of samples for batches of different sizes.

        Raises:
            ValueError: If the weight is not above 0, the module is another one than before, or its parameters are not
                whole on this rank: under a pipeline, tensor or expert axis, FSDP, DeepSpeed or ZeRO stage 3.
            TypeError: If the closure cannot be called.
        """
        if not callable(closure):
            raise TypeError(f"closure={closure!r:.80} cannot be called: give a function that returns the loss.")
        if not (isfinite(weight) and weight > 0):
            raise ValueError(f"weight={weight!r} must be finite and above 0.")
        if self._measured and self._measured[0] is not module:
            raise ValueError(f"{type(self).__name__} has batches of another module. Call reset() between two modules.")
        _check_strategy(module)
        if getattr(_strategy_of(module), "measuring", None) is None:  # else they become whole in compute
            measured_parameters(module)
        with torch.inference_mode(False):
            inputs = map_leaves(_usable, inputs)
        self._measured = [module]
        self._terms.append(Term(closure, inputs, weight))

    @override
    def reset(self) -> None:
        super().reset()
        self._terms, self._measured = [], []

    @contextmanager
    def opened(self) -> Iterator[LossSurface | None]:
        """Context of the surface; None if no rank has a batch.

        Raises:
            ValueError: If only some ranks have one.
        """
        group = self._group()
        if not self._everywhere(group):
            yield None
            return
        module = self._measured[0]
        try:
            with getattr(_strategy_of(module), "measuring", nullcontext)():
                surface = LossSurface(module, self._terms, group)
                with surface.open():
                    yield surface
        except RuntimeError as error:
            if "Inference tensors cannot be saved" not in str(error):
                raise
            raise RuntimeError(
                "The closure uses a tensor that was made in inference mode. Give the batch to update, as in "
                f"{type(self).__name__}.update(module, loss, batch), which copies it, or Trainer(inference_mode=False)."
            ) from error

    def _group(self) -> dist.ProcessGroup | None:
        if not (self.sync_on_compute and dist.is_available() and dist.is_initialized()):
            return None
        return self.process_group or dist.group.WORLD

    def _everywhere(self, group: dist.ProcessGroup | None) -> bool:
        """Whether all ranks have a batch."""
        have = [bool(self._terms)]
        if group is not None:
            have *= group.size()
            dist.all_gather_object(have, bool(self._terms), group=group)
        if any(have) and not all(have):
            raise ValueError(
                f"Ranks {[rank for rank, has in enumerate(have) if not has]} have no batch for "
                f"{type(self).__name__}, and others have. Call update at least once on each rank."
            )
        return all(have)


def _usable(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def _check_strategy(module: nn.Module) -> None:
    """Refuse strategies by what they are, before parts of a model are taken for the whole."""
    strategy = _strategy_of(module)
    layout = getattr(getattr(getattr(strategy, "ground", None), "mesh", None), "layout", None)
    shards = layout is None and any(isinstance(child, FSDPModule) for child in module.modules())
    if shards or isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        name = "fully_shard" if strategy is None else type(strategy).__name__
        raise ValueError(f"{name} deals parameters out, and the measure needs them whole. {ALONE}")
    for axis in ("pipeline", "tensor", "expert"):
        size = getattr(layout, axis, 1)
        if size > 1:
            raise ValueError(
                f"With {axis}_parallel_size={size} no rank has the whole model, and the measure needs it. {ALONE}"
            )
    dtype = getattr(strategy, "compute_dtype", None)
    if dtype is not None:
        raise ValueError(f"Steps see parameters and batches as {dtype}, which rounds small moves away. {ALONE}")
    if getattr(strategy, "options", {}).get("zero_stage") == 3 and getattr(layout, "data", 1) > 1:
        raise ValueError(f"With zero_stage=3 no rank has whole parameters. Use zero_stage=0, 1 or 2. {ALONE}")


def _strategy_of(module: nn.Module) -> Any:
    """The strategy of the module's Trainer; None without one."""
    try:
        return module.trainer.strategy if isinstance(module, LightningModule) else None
    except RuntimeError:  # not attached to a Trainer
        return None
