"""What the tensor plan says about one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_hybrid.functional.splits import Split

STYLES = ("colwise", "fused_qkv", "fused_gate_up", "rowwise", "vocab", "heads", "sequence", "replicated")


@dataclass(frozen=True)
class Assignment:
    """One module and its style.

    Attributes:
        module: Dotted name.
        style: One of `STYLES`.
        splits: For each of its own parameters that is dealt out, how; by the parameter's name in the module, which may
            be dotted ("out_proj.weight" of an `nn.MultiheadAttention`).
        deferred: Its own parameters that stay whole and are read where only a shard of the sequence is: their gradients
            are summed over the tensor axis at the end of an accumulation window.
        note: For the table: why the automatic plan left the module whole, or what a given style costs; mostly empty.
    """

    module: str
    style: str
    splits: Mapping[str, Split] = field(default_factory=dict)
    deferred: tuple[str, ...] = ()
    note: str = ""
