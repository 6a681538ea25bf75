"""How many bytes a training step keeps: formulas, sums by module, and numbers of bytes in words."""

from __future__ import annotations

from collections.abc import Mapping


def state_bytes(parameter_bytes: float, *, copies: int, num_steps: int = 0, num_shards: int = 1) -> float:
    """Bytes of an optimizer's state on one rank.

    Args:
        parameter_bytes: Bytes of the trainable parameters, whole.
        copies: Tensors of the parameter's size and type: 1 for SGD with momentum, 2 for Adam and AdamW.
        num_steps: Step counters, float32: for Adam and AdamW as many as parameters; 0 for SGD. Each shard has its own.
        num_shards: Replicas that share the state, as in ZeRO stage 1.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 3.1.
    """
    return copies * parameter_bytes / num_shards + 4 * num_steps


def zero_state_bytes(zero_stage: int, num_ranks: int, *, masters: bool = False) -> float:
    """Bytes for each float32 parameter on one rank at the peak of a step with Adam, without what a unit has whole.

    Args:
        zero_stage: 0 to 3.
        num_ranks: Replicas that share the states, N.
        masters: The whole parameter is a copy of 2 bytes, made of the shard while a unit is gathered.

    Returns:
        Of parameter, gradient and two moments (4 bytes each), what is whole counts fully, what is sharded by 1/N: 16 in
        stage 0, 8 + 8/N in stage 1, 4 + 12/N in stage 2 and 16/N in stage 3. With masters, which no copy can stand for,
        18, 6 + 12/N, 2 + 16/N and 16/N.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5, with 4 bytes for everything but the copies.
    """
    plain = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}
    with_copies = {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 16)}
    whole, sharded = (with_copies if masters else plain)[zero_stage]
    return whole + sharded / num_ranks


def shorten(name: str, depth: int | None) -> str:
    """The first `depth` parts of a dotted name; all of it if `depth` is None."""
    return name if depth is None else ".".join(name.split(".")[:depth])


def sum_by_module(num_bytes: Mapping[str, int], depth: int | None) -> dict[str, int]:
    """Sums of bytes over modules whose names begin with the same `depth` parts."""
    sums: dict[str, int] = {}
    for name, number in num_bytes.items():
        short = shorten(name, depth)
        sums[short] = sums.get(short, 0) + number
    return sums


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """The largest unit of which there is at least one, up to GiB, and its bytes."""
    exponent = next((e for e in (3, 2, 1) if num_bytes >= 1024**e), 0)
    return ("B", "KiB", "MiB", "GiB")[exponent], 1024**exponent


def byte_words(num_bytes: float) -> str:
    """A number of bytes for people, such as "1.5 MiB"."""
    unit, size = byte_unit(num_bytes)
    return f"{num_bytes / size:.1f} {unit}" if size > 1 else f"{num_bytes:.0f} B"
