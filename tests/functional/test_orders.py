import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_hybrid.functional.orders import batches_after, batches_of_pass, share_of


@given(samples=st.integers(1, 20), replicas=st.integers(1, 7), shuffle=st.booleans(), drop_last=st.booleans())
def test_shares_are_those_of_torchs_own_sampler(samples, replicas, shuffle, drop_last):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(5)) if shuffle else range(samples)
    for rank in range(replicas):
        sampler = DistributedSampler(range(samples), replicas, rank, shuffle=shuffle, seed=5, drop_last=drop_last)
        if drop_last and samples < replicas:
            continue  # torch counts below zero there
        assert list(share_of(order, replicas, rank, drop_last=drop_last)) == list(sampler)


def test_an_order_that_nobody_shares_takes_no_memory():
    assert share_of(range(10**12), 1, 0)[10**11 :] == range(10**11, 10**12)
    assert share_of(range(10**12), 4, 1)[1] == 5


@given(number=st.integers(0, 50), length=st.integers(0, 9))
def test_passes_begin_anew_or_end(number, length):
    given = 0  # batches of the pass, counted as a loader does that is asked once a step
    for _ in range(number):
        given = 1 if given == length else given + 1
    assert batches_of_pass(number, length, cycles=True) == (given if length else 0)
    assert batches_of_pass(number, length, cycles=False) == min(number, length)


def test_samples_are_whole_batches_or_not():
    assert batches_after(24, 8) == 3
    assert batches_after(0, 8) == 0
    assert batches_after(20, 8) is None
