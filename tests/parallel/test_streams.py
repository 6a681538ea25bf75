import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.parallel.streams import Streams, derived_seed, random_state, set_random_state

CPU = torch.device("cpu")
PARTS = st.lists(st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.tuples(st.integers())), max_size=4)


def draws():
    return torch.rand(2).tolist(), random.random(), numpy.random.rand()


@given(parts=PARTS)
def test_a_seed_fits_every_generator_and_depends_on_nothing_else(parts):
    seed = derived_seed(*parts)
    assert 0 <= seed < 2**63
    assert seed == derived_seed(*parts)


@given(one=PARTS, other=PARTS)
def test_other_parts_give_another_seed(one, other):
    assert (derived_seed(*one) == derived_seed(*other)) == (repr(one) == repr(other))


def test_seeds_are_the_same_in_every_process_and_version():
    assert derived_seed() == 2847183694713211083
    assert derived_seed(1, "training_step", 0) == 851305355361644781


@pytest.mark.parametrize(
    ("one", "other"), [((1, 23), (12, 3)), (("a", "b"), ("ab",)), ((1,), ("1",)), ((1, 2), ((1, 2),))]
)
def test_parts_do_not_run_into_each_other(one, other):
    assert derived_seed(*one) != derived_seed(*other)


def test_the_same_parts_start_all_three_streams_alike():
    with Streams(CPU) as streams:
        streams.seed(3, "step", 0, 1)
        first = draws()
        draws()
        streams.seed(3, "step", 0, 1)
        assert draws() == first
        streams.seed(3, "step", 0, 2)
        assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_the_users_streams_go_on_as_if_nothing_had_been():
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    expected = draws()
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    with Streams(CPU) as streams:
        streams.seed("something")
        draws()
    assert draws() == expected


def test_the_users_streams_are_restored_after_an_error():
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    expected = draws()
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    with pytest.raises(ZeroDivisionError), Streams(CPU):
        draws()[1] / 0
    assert draws() == expected


def test_contexts_may_be_nested():
    with Streams(CPU) as streams:
        streams.seed("outer")
        expected = draws()
        streams.seed("outer")
        with Streams(CPU) as streams:
            streams.seed("inner")
            draws()
        assert draws() == expected


def test_streams_go_on_from_a_saved_state_that_is_plain_data(tmp_path):
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    random.gauss(0, 1), numpy.random.standard_normal()  # both generators keep a second number
    torch.save(random_state(CPU), tmp_path / "state")
    after = [draws(), random.gauss(0, 1), numpy.random.standard_normal()]
    torch.manual_seed(4), random.seed(5), numpy.random.seed(6)
    set_random_state(torch.load(tmp_path / "state", weights_only=True), CPU)
    assert [draws(), random.gauss(0, 1), numpy.random.standard_normal()] == after
