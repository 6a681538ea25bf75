"""What each block costs and weighs together with what stands beside it: measured, or estimated by parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from inspect import signature
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.gradients import install_gradients, take_gradients
from lightning_hybrid.parallel.meta.materialising import initialised
from lightning_hybrid.parallel.pipeline.blocks import block_names, find_block_lists
from lightning_hybrid.parallel.pipeline.cut import ancestors_of, outside_modules
from lightning_hybrid.parallel.pipeline.gates import GATE, Gate, GateKeeper, add_gate, remove_gate
from lightning_hybrid.parallel.pipeline.snapshot import Snapshot
from lightning_hybrid.strategies.losses import loss_of


def estimated_costs(module: nn.Module, blocks: Sequence[str]) -> list[float]:
    """Numbers of parameters that each block, and what stands beside it, multiplies by; embeddings only look up."""
    return [float(sum(_multiplied(part) for part in parts)) for parts in _with_neighbours(module, blocks)]


def block_bytes(module: nn.Module, blocks: Sequence[str]) -> list[int]:
    """Bytes of the parameters of each block and of what stands beside it; one shared by two blocks counts for each."""
    found = []
    for parts in _with_neighbours(module, blocks):
        parameters = {id(parameter): parameter for part in parts for parameter in part.parameters()}
        found.append(sum(parameter.numel() * parameter.element_size() for parameter in parameters.values()))
    return found


def _with_neighbours(module: nn.Module, blocks: Sequence[str]) -> list[list[nn.Module]]:
    """Each block and the modules registered behind it outside the blocks; those before the first count with that."""
    order = {name: index for index, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    groups = [{id(block): block} for block in map(module.get_submodule, blocks)]
    for name in outside_modules(module, ancestors_of(blocks), set(blocks)):
        outside = module.get_submodule(name)
        before = sum(order[block] < order[name] for block in blocks)
        groups[max(before - 1, 0)][id(outside)] = outside
    return [list(group.values()) for group in groups]


def _multiplied(module: nn.Module) -> int:
    layers = [child for child in module.modules() if not isinstance(child, nn.Embedding | nn.EmbeddingBag)]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters(recurse=False))


ONCE = "A pipeline runs each block once in every step, in the order of registration, or that of pipeline_layers=[...]."


def measure_costs(
    module: LightningModule, batch: Any, *, pipeline_layers: str | list[str] | None = None, num_runs: int = 5
) -> list[float]:
    """Time each block in the module's own `training_step`, forward and backward, in this process.

    What stands before the first block counts with that, and everything else outside the blocks (a head, the loss) with
    the block before it, which is also the stage that will run it. Weights, gradients, buffers, attributes and random
    streams are as before afterwards, and nothing is logged.

    Args:
        module: Uncut, where it is to run (on its device); a Trainer is not needed. What is on the meta device is made
            on the batch's, and is on the meta device again afterwards.
        batch: What `training_step` takes, on the same device; best of a micro-batch's size.
        pipeline_layers: As the strategy's.
        num_runs: Runs that the medians are of, after one that warms up.

    Returns:
        Seconds of each block, for the strategy's `block_costs`.

    Raises:
        ValueError: If the model has no blocks, or `num_runs` is below 1.
        RuntimeError: If `training_step` does not call each block once, in order, or a Trainer has cut the module.
    """
    if num_runs < 1:
        raise ValueError(f"num_runs={num_runs} must be at least 1.")
    if any(GATE in vars(child) for child in module.modules()):
        raise RuntimeError("The module has been cut by a Trainer, and others have the rest. Measure a new one.")
    module.configure_model()
    blocks = block_names(module, find_block_lists(module, pipeline_layers))
    if not blocks:
        raise ValueError(
            "The model has no nn.ModuleList or nn.Sequential with two elements that hold parameters: there are no "
            "blocks to measure. Put its layers in one."
        )
    tensors = [leaf for leaf in [*module.parameters(), *leaves_of(batch)] if isinstance(leaf, Tensor)]
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    with initialised(module, torch.initial_seed(), device, blocks):
        return _measure(module, batch, blocks, device, num_runs)


def _measure(
    module: LightningModule, batch: Any, blocks: list[str], device: torch.device, num_runs: int
) -> list[float]:
    kept = take_gradients(module.parameters())
    try:
        with Snapshot(module, device), torch.enable_grad():
            vars(module).update(dict.fromkeys(("log", "log_dict"), _log_nothing))  # there may be no Trainer
            runs = [_Stopwatch(module, blocks, device).run(batch) for _ in range(1 + num_runs)][1:]
    finally:
        take_gradients(module.parameters())
        install_gradients(kept)
    return [median(times) for times in zip(*runs, strict=True)]


class _Stopwatch:
    """Times one step: a block's part begins where the block is called, and where the gradient of its input is known."""

    stage, is_probe, entered = 0, False, True  # what gates ask

    def __init__(self, module: LightningModule, blocks: Sequence[str], device: torch.device) -> None:
        self.module, self.blocks, self.device = module, blocks, device
        self.called: list[float] = []
        self.returned: dict[int, float] = {}
        self.hooks: list[Any] = []

    def run(self, batch: Any) -> list[float]:
        """Seconds of each block, forward and backward."""
        step = self.module.training_step
        arguments = [batch, 0][: len(signature(step).parameters)]
        keeper = GateKeeper(self.device)
        for index, name in enumerate(self.blocks):
            add_gate(self.module.get_submodule(name), Gate(keeper, name, index, owned=True))
        try:
            keeper.active, start = self, self._now()
            loss, _ = loss_of(step(*arguments))
            keeper.active, middle = None, self._now()  # an activation checkpoint will call blocks again
            if len(self.called) != len(self.blocks):
                raise RuntimeError(f"training_step ended without calling {self.blocks[len(self.called)]}. {ONCE}")
            loss.backward()
            return self._shares(start, middle, self._now())
        finally:
            for name in self.blocks:
                remove_gate(self.module.get_submodule(name))
            for hook in self.hooks:
                hook.remove()

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note when a block is called, and when the gradient of its arguments is known."""
        index = len(self.called)
        if gate.position != index:
            raise RuntimeError(f"training_step calls {gate.name} twice, or not in order. {ONCE}")
        self.called.append(self._now())

        def note(gradient: Tensor) -> None:
            self.returned.setdefault(index, self._now())

        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        self.hooks += [tensor.register_hook(note) for tensor in tensors if tensor.requires_grad]
        return proceed(*args, **kwargs)

    def observe(self, value: object, reader: str) -> None:
        """Every value is true in a whole model."""

    def _shares(self, start: float, middle: float, end: float) -> list[float]:
        forward = [b - a for a, b in zip([start, *self.called[1:]], [*self.called[1:], middle], strict=True)]
        backward, before = [0.0] * len(forward), middle
        for index in reversed(range(len(forward))):
            until = self.returned.get(index, end) if index else end  # without a gradient nothing comes after
            backward[index] = max(until - before, 0.0)
            before = max(until, before)
        return [a + b for a, b in zip(forward, backward, strict=True)]

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `self.log`."""
