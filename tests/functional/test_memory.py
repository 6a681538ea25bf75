import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.memory import byte_words, shorten, state_bytes, sum_by_module, zero_state_bytes


@pytest.mark.parametrize(
    ("make", "copies", "steps"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0, False),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1, False),
        (torch.optim.Adam, 2, True),
        (torch.optim.AdamW, 2, True),
    ],
)
def test_formula_gives_what_torchs_optimizers_keep(make, copies, steps):
    parameters = [torch.ones(3, 4, requires_grad=True), torch.ones(5, requires_grad=True)]
    optimizer = make(parameters)
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    assert sum(t.numel() * t.element_size() for t in kept) == state_bytes(
        4 * 17, copies=copies, num_steps=2 if steps else 0
    )


def test_shards_divide_the_copies_and_not_the_counters():
    assert state_bytes(1000, copies=2, num_steps=10, num_shards=4) == 540


@given(sizes=st.dictionaries(st.from_regex(r"[ab](\.[ab]){0,3}", fullmatch=True), st.integers(0, 100)))
def test_sums_by_module_keep_the_total_at_every_depth(sizes):
    for depth in (None, 0, 1, 2):
        sums = sum_by_module(sizes, depth)
        assert sum(sums.values()) == sum(sizes.values())
        assert set(sums) == {shorten(name, depth) for name in sizes}
    assert sum_by_module(sizes, None) == sizes


def test_names_are_cut_between_their_parts():
    assert [shorten("model.layers.10.mlp", depth) for depth in (0, 2, 3, 9)] == [
        "",
        "model.layers",
        "model.layers.10",
        "model.layers.10.mlp",
    ]


def test_zero_stages_of_one_rank_keep_what_is_whole_and_a_share_of_the_rest():
    assert [zero_state_bytes(stage, 4) for stage in range(4)] == [16, 10, 7, 4]


def test_masters_add_copies_of_two_bytes_to_what_stands_for_whole_parameters():
    assert [zero_state_bytes(stage, 4, masters=True) for stage in range(4)] == [18, 9, 6, 4]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**40, "1024.0 GiB")],
)
def test_bytes_are_said_in_the_largest_unit_that_they_fill(number, words):
    assert byte_words(number) == words
