import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.boxes import Box


@st.composite
def boxes(draw):
    """A shape and a box of it."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    starts = [draw(st.integers(0, size)) for size in shape]
    ends = [draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True)]
    return shape, Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


@given(boxes())
def test_runs_are_the_box_in_order_of_memory(case):
    shape, box = case
    whole = torch.arange(Box.of(shape).numel).view(shape)
    found = [range(start, start + run.numel) for start, run in box.runs(shape)]
    assert [n for run in found for n in run] == box.view(whole).flatten().tolist()
    for start, run in box.runs(shape):
        assert run.view(whole).flatten().tolist() == list(range(start, start + run.numel))


def test_runs_are_as_long_as_can_be():
    assert [run for _, run in Box((2, 0, 0), (3, 4, 5)).runs((6, 4, 5))] == [Box((2, 0, 0), (3, 4, 5))]
    assert len(list(Box((0, 1, 0), (3, 2, 5)).runs((3, 4, 5)))) == 3
    assert [start for start, _ in Box((), ()).runs(())] == [0]


@given(boxes(), st.integers(0, 50))
def test_cuts_are_small_and_make_up_the_box_in_order(case, most):
    shape, box = case
    whole = torch.arange(Box.of(shape).numel).view(shape)
    cuts = list(box.cut(most))
    assert [n for cut in cuts for n in cut.view(whole).flatten().tolist()] == box.view(whole).flatten().tolist()
    assert not box.numel or all(0 < cut.numel <= max(1, most) for cut in cuts)
