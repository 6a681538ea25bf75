"""Which layers a K-FAC preconditioner takes, on all ranks together, and what it says of them before training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.table import Table
from torch import nn

from lightning_hybrid.callbacks.kfac_runs import held_by_name
from lightning_hybrid.callbacks.reports import fail_together, show
from lightning_hybrid.compat import is_compiled
from lightning_hybrid.functional.kfac import decomposed, inverted, precondition
from lightning_hybrid.functional.name_rules import first_match, places
from lightning_hybrid.parallel.checkpoint.parts import Part
from lightning_hybrid.parallel.curvature.factors import RunningFactors
from lightning_hybrid.parallel.curvature.layers import KINDS, Layer, is_layer, layer_of
from lightning_hybrid.parallel.ledgers.traffic import over_ranks

NAME = "KFACPreconditioner"
LARGEST = 2**14  # rows of a factor that is taken without being asked for, 1 GB in float32


@dataclass
class Chosen:
    """Layers of this rank.

    Attributes:
        layers: By dotted name, in the model's order, the same on all ranks that have them.
        modules: What they are, by the same names.
        counted: Those that no rank before has too.
        left: Why other layers keep their gradients, by name.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)


def choose(trainer: Trainer, pl_module: LightningModule, rules: Sequence[str | type[nn.Module]] | None) -> Chosen:
    """The layers of this rank, once it is settled what it has; all ranks call it together.

    Args:
        trainer: In `fit`.
        pl_module: Its module.
        rules: Those that are wanted, as `first_match` takes them; None takes all that can be.

    Raises:
        ValueError: On all ranks, if a wanted layer cannot be taken, a rule matches nothing, or nothing is left.
    """
    chosen, matched, error = Chosen(), set[int](), ""
    held = _held(trainer)
    apart = _apart(trainer, pl_module)
    where = places(pl_module)
    for name, module in pl_module.named_modules():
        trained = _trained(name, module, held)
        if trained is None:
            continue
        rule = None if rules is None else first_match(rules, where[id(trained)])
        split = apart.get(f"{name}.weight", "")  # it has other sizes here than its module says
        layer = split if split and is_layer(module) else layer_of(module)
        if layer is None or (rules is not None and rule is None):
            continue
        matched |= {rule} if rule is not None else set()
        reason = layer if isinstance(layer, str) else _reason(pl_module, name, module, held, apart)
        reason = reason or (_size(layer) if isinstance(layer, Layer) and rules is None else "")
        if reason and (rules is not None or "split" in reason):
            way_out = "Name others in modules" if rules is None else f"Leave it out of modules={rules!r}"
            error = error or f"{name} cannot have Kronecker factors: {reason}. {way_out}."
        if reason:
            chosen.left[name] = reason
        elif not isinstance(layer, str):
            chosen.layers[name], chosen.modules[name] = layer, module
    fail_together(error)
    _agree(chosen, matched, rules)
    return chosen


def _agree(chosen: Chosen, matched: set[int], rules: Sequence[str | type[nn.Module]] | None) -> None:
    everyone = over_ranks((list(chosen.layers), matched))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    before = {name for names, _ in everyone[:rank] for name in names}
    chosen.counted = set(chosen.layers) - before
    used = set[int]().union(*(numbers for _, numbers in everyone))
    for number, rule in enumerate(rules or ()):
        if number not in used:
            raise ValueError(f"modules={rules!r}: {rule!r} matches no trained layer. Give names or types of {KINDS}.")
    if not any(names for names, _ in everyone):
        raise ValueError(f"The model has no trained layer with Kronecker factors: {KINDS}. Leave {NAME} out.")


def _held(trainer: Trainer) -> Collection[str]:
    """Names of parameters that this rank trains."""
    optimized = {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
    return {name for name, p in held_by_name(trainer).items() if p.requires_grad and id(p) in optimized}


def _trained(name: str, module: nn.Module, held: Collection[str]) -> nn.Parameter | None:
    """A module's weight, or the first of the parameters that a layer's is made from; None if it is not trained."""
    weight = getattr(module, "weight", None)
    if weight is not None and f"{name}.weight" in held:
        return weight
    inner = module.named_parameters() if is_layer(module) and f"{name}.weight" not in held else ()
    return next((p for own, p in inner if own != "bias" and f"{name}.{own}" in held), None)


def _size(layer: Layer) -> str:
    """Why a layer is not taken unless it is named: its factors are too large; "" if they are not."""
    side = layer.rows if layer.is_diagonal else max(layer.rows, layer.columns)
    if side <= LARGEST:
        return ""
    return f"{side} x {side} is {4e-9 * side**2:.1f} GB in float32, and three of them; name it in modules to take it"


def _apart(trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
    """Why a module's own calls do not make all of the gradient of a parameter, by its name."""
    ask = getattr(trainer.strategy, "set_apart", None)
    apart: dict[str, str] = dict(ask()) if ask is not None else {}
    first: dict[int, str] = {}
    for name, parameter in pl_module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            apart |= {name: f"its {name.rpartition('.')[2]} is tied to {other}", other: f"it is tied to {name}"}
    return apart


def _reason(
    pl_module: LightningModule, name: str, module: nn.Module, held: Collection[str], apart: Mapping[str, str]
) -> str:
    """Why a layer cannot have factors; "" if it can."""
    for own, _ in module.named_parameters(recurse=False):
        if own not in ("weight", "bias"):
            return f"it has a parameter {own}"
        if f"{name}.{own}" not in held:
            return f"its {own} is not trained"
        if f"{name}.{own}" in apart:
            return apart[f"{name}.{own}"]
    components = name.split(".")
    outer = (".".join(components[:stop]) for stop in range(len(components) + 1))
    compiled = next((path for path in outer if is_compiled(pl_module.get_submodule(path))), None)
    return "" if compiled is None else f"{compiled or type(pl_module).__name__} is compiled, and calls of it unseen"


def warn_of_uncalled(factors: RunningFactors, parts: Mapping[str, Part]) -> None:
    """Say which layers have had no call in the first window, and gradients all the same.

    Args:
        factors: With what the window has given.
        parts: Gradients of the step, by the names of parameters.
    """

    def has_gradient(name: str) -> bool:
        pieces = parts[f"{name}.weight"].pieces if f"{name}.weight" in parts else ()
        return any(bool(piece.data.any()) for piece in pieces)

    names = [name for name, own in factors.of.items() if not own.count and has_gradient(name)]
    if names:
        warnings.warn(
            f"{NAME} has seen no call of {', '.join(names)}, and their weights have gradients: other code uses them "
            "(F.linear). These gradients stay as they are. Call the layers, or leave them out of modules.",
            stacklevel=2,
        )


def show_layers(trainer: Trainer, chosen: Chosen, factors: RunningFactors, method: str) -> None:
    """Print what each layer takes, on rank 0; all ranks call it together."""
    times: dict[tuple[int, int, bool], tuple[float, float]] = {}
    rows, rank = [], torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for name, layer in chosen.layers.items():
        key = (layer.columns, layer.rows, layer.is_diagonal)
        if key not in times:
            times[key] = _measure(layer, method, factors.of[name].first)
        if name in chosen.counted:
            owner = factors.rank_of(name)
            rows.append((name, type(chosen.modules[name]).__name__, *key, factors.num_bytes(name), *times[key], owner))
    everyone = over_ranks((rows, chosen.left, rank))
    table = Table(title="K-FAC: layers with Kronecker factors")
    for column in ("layer", "type", "A", "G", "MB a rank", "inverses, ms", "each step, ms", "inverted by rank"):
        table.add_column(column, justify="left" if column in ("layer", "type") else "right")
    whole = [row for found, *_ in everyone for row in found]
    for name, kind, columns, height, diagonal, num_bytes, inverse, step, owner in whole:
        sizes = f"{columns}{' (diagonal)' if diagonal else ''}", str(height)
        table.add_row(
            name, kind, *sizes, f"{num_bytes / 1e6:.2f}", f"{1e3 * inverse:.2f}", f"{1e3 * step:.3f}", str(owner)
        )
    table.add_section()
    sums = [sum(row[index] for row in whole) for index in (5, 6, 7)]
    table.add_row("all", "", "", "", f"{sums[0] / 1e6:.2f}", f"{1e3 * sums[1]:.2f}", f"{1e3 * sums[2]:.3f}", "")
    for _, left, _ in everyone:
        for name, reason in left.items():
            table.add_row(name, "left alone", "", "", "", "", "", reason)
    show(trainer, table)


def _measure(layer: Layer, method: str, like: torch.Tensor) -> tuple[float, float]:
    """Seconds that a layer's inverses take, and a natural gradient, with factors of its sizes."""

    def factor(size: int, *, diagonal: bool) -> torch.Tensor:
        ones = torch.ones(size, dtype=like.dtype, device=like.device)
        return ones if diagonal else torch.diag(ones) + 1.0 / size

    make = inverted if method == "inverse" else decomposed
    factors = factor(layer.columns, diagonal=layer.is_diagonal), factor(layer.rows, diagonal=False)
    first, second = (make(each, 1.0) for each in factors)
    assert first is not None
    assert second is not None
    inverting = _seconds(lambda: [make(each, 1.0) for each in factors], like.device)
    gradient = torch.ones(layer.rows, layer.columns, dtype=like.dtype, device=like.device)
    damping = 1.0 if method == "eigen" else None
    return inverting, _seconds(lambda: precondition(gradient, first, second, damping), like.device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    wait = torch.get_device_module(device).synchronize if device.type != "cpu" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def wide_type(modules: Mapping[str, nn.Module]) -> torch.dtype:
    """The type of factors: that of the layers, and at least float32."""
    dtype = torch.float32
    for module in modules.values():
        dtype = torch.promote_types(dtype, next(module.parameters(recurse=False)).dtype)
    return dtype
