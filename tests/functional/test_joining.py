from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.joining import interleave, join
from lightning_hybrid.parallel.pipeline.microbatch import split_batch

Pair = namedtuple("Pair", "a b")


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@given(st.integers(1, 9), st.integers(1, 9))
def test_what_split_batch_cuts_is_joined_again(samples, parts):
    batch = {
        "x": torch.arange(samples * 3).view(samples, 3),
        "pair": Pair(torch.arange(samples), (torch.arange(samples) + 5, torch.arange(2 * samples).view(samples, 2))),
        "names": [f"s{i}" for i in range(samples)],
        "same": {"a": 1.5, "b": "text", "c": None, "d": True},
    }
    cut = split_batch(batch, parts)
    joined = join(cut, [len(part["x"]) for part in cut])
    assert isinstance(joined["pair"], Pair)
    assert joined["names"] == batch["names"]
    assert joined["same"] == batch["same"]
    equal([joined["x"], joined["pair"].a, *joined["pair"].b], [batch["x"], batch["pair"].a, *batch["pair"].b])


@given(st.integers(1, 4), st.integers(0, 30))
def test_what_is_dealt_in_turn_comes_back_in_order(replicas, samples):
    shares = [list(range(samples))[r::replicas] for r in range(replicas)]
    shares = [share for share in shares if share] or [[]]
    sizes = [len(share) for share in shares]
    outputs = [{"x": torch.tensor(share), "pair": ([f"s{i}" for i in share], 7)} for share in shares]
    value = interleave(join(outputs, sizes), sizes)
    assert value["x"].tolist() == list(range(samples))
    assert value["pair"] == ([f"s{i}" for i in range(samples)], 7)


def test_a_list_with_one_thing_a_sample_stays_one():
    """Detections: another number of boxes for each image."""
    first, second = [{"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(0, 4)}], [{"boxes": torch.ones(5, 4)}]
    joined = join([first, second], [2, 1])
    assert [len(each["boxes"]) for each in joined] == [2, 0, 5]
    assert [len(each["boxes"]) for each in interleave(joined, [2, 1])] == [2, 5, 0]


def test_a_list_has_one_entry_a_sample_and_a_tuple_several_things_whatever_their_lengths():
    two = torch.arange(2.0)
    equal(join([[two, two], [two]], [2, 1]), [two, two, two])  # as many numbers as samples, by chance
    equal(join([(two, two), (two, two)], [2, 2]), (torch.cat([two, two]), torch.cat([two, two])))
    assert join([{"size": (640, 480)}, {"size": (640, 480)}], [4, 4]) == {"size": (640, 480)}
    assert join([[], []], [2, 1]) == []


def test_types_of_mappings_stay():
    joined = join([OrderedDict(a=torch.zeros(1)), OrderedDict(a=torch.ones(2))], [1, 2])
    assert type(joined) is OrderedDict
    equal(joined["a"], torch.tensor([0.0, 1, 1]))


@pytest.mark.parametrize("value", [torch.tensor(3.0), object(), torch.zeros(7), 5, None])
def test_one_part_may_be_anything(value):
    assert join([value], [2]) is value


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.tensor(1.0), torch.tensor(1.0)], r"a tensor of shape \[\] for parts of a batch with \[2, 1\] samples"),
        ([torch.zeros(3), torch.zeros(1)], r"a tensor of shape \[1\], a tensor of shape \[3\]"),
        ([torch.zeros(2, 3), torch.zeros(1, 4)], r"shapes \[\[2, 3\], \[1, 4\]\].*one tensor a sample"),
        ([{"a": 1}, {"b": 1}], r"a mapping with \['a'\], a mapping with \['b'\]"),
        ([1, 2], "returned int for parts"),
        ([1, True], "returned bool, int for parts"),
        ([None, torch.zeros(1)], "NoneType"),
        ([[1, 2, 3], [1]], "list of length"),
        ([[torch.zeros(2)] * 3, [torch.zeros(1)] * 3], "list of length 3"),
        ([("a", "b"), ("c",)], r"tuples of 2 constants.*Return a list for the first, a dictionary for the second"),
        ([{"size": (640, 480)}, {"size": (640,)}], "tuples of 2 constants"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_the_way_out(parts, message):
    with pytest.raises(ValueError, match=message):
        join(parts, [2, 1])
