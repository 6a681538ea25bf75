"""How many bytes collectives move: formulas that the counted traffic can be held against."""

from __future__ import annotations

# collectives in which each part passes each rank of the ring once
ONE_PASS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"})


def ring_bytes(collective: str, num_bytes: float, num_ranks: int) -> float:
    """Bytes that one rank sends when a collective runs over a ring.

    Args:
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
            "scatter", "send", "recv" or "barrier".
        num_bytes: Bytes of the tensor: for all_gather the gathered whole, for reduce_scatter and all_to_all one rank's
            whole input, for gather and scatter one rank's part.
        num_ranks: Ranks of the group, N.

    Returns:
        2(N-1)/N times the bytes for all_reduce, all of them for send, none for recv and barrier, (N-1)/N times the
        bytes for the rest; where ranks differ (broadcast, reduce, gather, scatter) it is the mean over them.

    Raises:
        ValueError: If the collective is not known or there is no rank.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a group has at least one rank.")
    once = num_bytes * (num_ranks - 1) / num_ranks
    if collective == "all_reduce":
        return 2 * once
    if collective == "send":
        return float(num_bytes)
    if collective in ("recv", "barrier"):
        return 0.0
    if collective in ONE_PASS:
        return once
    raise ValueError(f"collective={collective!r} is not known; it is one of {sorted(ONE_PASS)}, all_reduce, send, ...")


def pipeline_bytes(payload: int, *, num_microbatches: int, num_stages: int) -> int:
    """Payload bytes that one replica sends forward in one step; backward it is the same for gradients of its floats.

    Args:
        payload: Bytes that cross one stage boundary for one micro-batch.
        num_microbatches: Micro-batches of a step, over all batches of an accumulation window.
        num_stages: Stages of the whole model, over all chunks.
    """
    return payload * num_microbatches * (num_stages - 1)


def zero_bytes(parameter_bytes: float, *, zero_stage: int, num_ranks: int, num_microbatches: int) -> float:
    """Bytes that one rank of a ring sends over the data axis in one step, for gradients and parameters.

    Args:
        parameter_bytes: Of all parameters of this rank's stages; gradients are reduced in the same type.
        zero_stage: 0 to 3.
        num_ranks: Replicas that share the states, N.
        num_microbatches: Micro-batches of a step, m, over all batches of an accumulation window.

    Returns:
        (N-1)/N times the bytes, once for each pass: stages 0 and 1 make two a step; stage 2 gathers once and scatters m
        times; stage 3 gathers for each forward and each backward and scatters after it.

    Raises:
        ValueError: If the stage is not one of these.

    Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 7, which has m = 1: 2, 2, 2 and 3 passes.
    """
    passes = {0: 2, 1: 2, 2: 1 + num_microbatches, 3: 3 * num_microbatches}
    if zero_stage not in passes:
        raise ValueError(f"zero_stage={zero_stage} is not 0, 1, 2 or 3.")
    return passes[zero_stage] * ring_bytes("all_gather", parameter_bytes, num_ranks)
