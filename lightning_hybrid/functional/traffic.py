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
