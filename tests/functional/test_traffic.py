import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.traffic import ONE_PASS, pipeline_bytes, ring_bytes, zero_bytes

SIZES = st.integers(1, 64)


def ring_all_reduce(num_ranks):
    """Bytes that rank 0 sends, one byte a part: each of 2(N-1) rounds passes one part on."""
    parts = [[{(rank, part)} for part in range(num_ranks)] for rank in range(num_ranks)]
    sent = 0
    for turn in range(2 * (num_ranks - 1)):
        adds = turn < num_ranks - 1
        for rank in range(num_ranks):
            part, right = (rank - turn + (0 if adds else num_ranks)) % num_ranks, (rank + 1) % num_ranks
            part = part if adds else (rank + 1 - (turn - num_ranks + 1)) % num_ranks
            parts[right][part] = parts[rank][part] | (parts[right][part] if adds else set())
            sent += rank == 0
    everything = [{(rank, part) for rank in range(num_ranks)} for part in range(num_ranks)]
    assert all(of_rank == everything for of_rank in parts)
    return sent


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_all_reduce_sends_what_a_simulated_ring_sends(num_ranks):
    assert ring_bytes("all_reduce", num_ranks, num_ranks) == ring_all_reduce(num_ranks)


@given(num_bytes=st.integers(0, 2**40), num_ranks=SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_bytes, num_ranks):
    halves = ring_bytes("reduce_scatter", num_bytes, num_ranks) + ring_bytes("all_gather", num_bytes, num_ranks)
    assert ring_bytes("all_reduce", num_bytes, num_ranks) == pytest.approx(halves)


@given(num_bytes=st.integers(1, 2**40), num_ranks=SIZES)
def test_a_collective_over_one_rank_is_free_and_none_sends_more_than_the_whole_in_one_pass(num_bytes, num_ranks):
    for collective in ONE_PASS:
        assert ring_bytes(collective, num_bytes, 1) == 0
        assert ring_bytes(collective, num_bytes, num_ranks) < num_bytes


def test_messages_count_where_they_are_sent():
    assert [ring_bytes(name, 10, 2) for name in ("send", "recv", "barrier")] == [10, 0, 0]


def test_unknown_collectives_and_empty_groups_are_refused():
    with pytest.raises(ValueError, match="collective='all_shout' is not known"):
        ring_bytes("all_shout", 1, 2)
    with pytest.raises(ValueError, match="num_ranks=0"):
        ring_bytes("send", 1, 0)


def test_a_pipeline_sends_over_every_boundary_for_every_micro_batch():
    assert pipeline_bytes(100, num_microbatches=4, num_stages=4) == 1200
    assert pipeline_bytes(100, num_microbatches=4, num_stages=1) == 0


@pytest.mark.parametrize(("num_microbatches", "passes"), [(1, [2, 2, 2, 3]), (4, [2, 2, 5, 12])])
def test_zero_stages_pass_over_the_parameters_a_number_of_times(num_microbatches, passes):
    one = ring_bytes("all_gather", 100, 4)
    found = [
        zero_bytes(100, zero_stage=stage, num_ranks=4, num_microbatches=num_microbatches) / one for stage in range(4)
    ]
    assert found == passes
    with pytest.raises(ValueError, match="zero_stage=4 is not 0, 1, 2 or 3"):
        zero_bytes(100, zero_stage=4, num_ranks=4, num_microbatches=1)
