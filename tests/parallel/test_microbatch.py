from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from transformers import BatchEncoding

from lightning_hybrid.parallel.pipeline.microbatch import (
    batch_size,
    join_batches,
    split_batch,
    split_by,
    split_sizes,
    structure_key,
)

Sample = namedtuple("Sample", "x names")


@given(samples=st.integers(0, 200), parts=st.integers(1, 40))
def test_sizes_are_even_descending_and_complete(samples, parts):
    sizes = split_sizes(samples, parts)
    assert sum(sizes) == samples
    assert len(sizes) == max(1, min(samples, parts))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert samples == 0 or min(sizes) >= 1


@pytest.mark.parametrize(
    ("samples", "parts", "sizes"), [(7, 3, [3, 2, 2]), (2, 5, [1, 1]), (0, 3, [0]), (1, 1, [1]), (6, 3, [2, 2, 2])]
)
def test_known_sizes(samples, parts, sizes):
    assert split_sizes(samples, parts) == sizes


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ({"scale": torch.tensor(2.0), "x": torch.zeros(3)}, 3),  # a tensor without dimensions says nothing
        (["a", "b", torch.zeros(4, 1)], 4),
        (["a", "b"], 2),  # texts, which the step turns into tokens
        ({"text": ["a", "b", "c"], "n": 7}, 3),
        (torch.tensor(1.0), 1),
        (None, 1),
        ([], 1),
        (torch.zeros(0, 3), 0),
        (BatchEncoding({"input_ids": torch.zeros(6, 2)}), 6),
        (Sample(torch.zeros(2, 9), ["a", "b"]), 2),
    ],
)
def test_the_first_tensor_with_a_dimension_tells_the_number_of_samples(batch, size):
    assert batch_size(batch) == size


def nested(samples):
    x = torch.arange(samples * 2.0).view(samples, 2)
    return {"x": x, "deep": [(x + 100,), {"y": x[:, 0]}], "mask": x > 3}


@settings(max_examples=40)
@given(samples=st.integers(1, 12), parts=st.integers(1, 6))
def test_the_parts_of_a_nested_batch_together_are_the_batch(samples, parts):
    batch = nested(samples)
    pieces = split_batch(batch, parts)
    assert [batch_size(piece) for piece in pieces] == split_sizes(samples, parts)
    for take in (lambda b: b["x"], lambda b: b["deep"][0][0], lambda b: b["deep"][1]["y"], lambda b: b["mask"]):
        assert torch.equal(torch.cat([take(piece) for piece in pieces]), take(batch))


def test_parts_are_views_of_the_batch():
    x = torch.zeros(7, 2)
    pieces = split_batch((x, x[:, 0]), 3)
    pieces[1][0].fill_(5.0)
    assert x[:, 0].tolist() == [0, 0, 0, 5, 5, 0, 0]


def test_a_batch_of_one_sample_or_one_part_is_passed_on_as_it_is():
    one, many = [torch.zeros(1, 2)], [torch.zeros(3)]
    assert split_batch(one, 4)[0] is one
    assert split_batch(many, 1)[0] is many


def test_a_batch_of_texts_is_cut():
    assert split_batch({"text": ["a", "b", "c"]}, 2) == [{"text": ["a", "b"]}, {"text": ["c"]}]


NAMES = list("abcdefg")


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        OrderedDict,
        BatchEncoding,
        lambda items: Sample(**items),
        lambda items: list(items.values()),
        lambda items: tuple(items.values()),
        lambda items: {"deep": [items]},
    ],
    ids=["dict", "OrderedDict", "BatchEncoding", "named tuple", "list", "tuple", "nested"],
)
def test_lists_with_one_thing_a_sample_are_cut_like_tensors(wrap):
    pieces = split_batch(wrap({"x": torch.arange(7), "names": NAMES}), 3)
    names = [
        next(leaf for leaf in walk(piece) if isinstance(leaf, list) and isinstance(leaf[0], str)) for piece in pieces
    ]
    assert names == [["a", "b", "c"], ["d", "e"], ["f", "g"]]


def walk(tree):
    yield tree
    children = tree.values() if hasattr(tree, "values") and not torch.is_tensor(tree) else tree
    if isinstance(tree, list | tuple) or hasattr(tree, "keys"):
        for child in children:
            yield from walk(child)


def test_the_container_types_of_a_batch_are_kept():
    batch = BatchEncoding({"input_ids": torch.zeros(4, 2), "pair": Sample(torch.zeros(4), None)})
    for piece in split_batch(batch, 2):
        assert isinstance(piece, BatchEncoding)
        assert piece.input_ids.shape == (2, 2)  # its attributes work too
        assert isinstance(piece["pair"], Sample)


def test_tuples_of_strings_stay_tuples():
    assert [piece[1] for piece in split_batch((torch.zeros(3), ("a", "b", "c")), 2)] == [("a", "b"), ("c",)]


def test_what_belongs_to_every_sample_goes_to_each_part():
    everyones = {"scale": torch.tensor(2.0), "task": "sort", "size": (224, 224), "flags": None, "few": ["a", "b"]}
    for piece in split_batch({"x": torch.zeros(7), **everyones}, 3):
        assert {name: piece[name] for name in everyones} == everyones


def test_lists_of_dictionaries_without_tensors_are_cut():
    labels = [{"id": i} for i in range(5)]
    pieces = split_batch({"x": torch.zeros(5, 2), "labels": labels}, 2)
    assert [[label["id"] for label in piece["labels"]] for piece in pieces] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(4, 2), torch.zeros(3)),
        {"x": torch.zeros(4), "targets": [{"boxes": torch.zeros(2, 4)} for _ in range(4)]},
        (torch.zeros(4), torch.zeros(1, 4)),
    ],
    ids=["two lengths", "boxes", "shared row"],
)
def test_another_first_dimension_is_refused_with_both_ways_out(batch):
    with pytest.raises(ValueError, match=r"4 samples and another has shape \[.*split_batch.*num_microbatches=1"):
        split_batch(batch, 2)


@given(st.permutations(["shape", "dtype", "grad", "flag", "key", "kind", "none"]))
def test_whatever_a_plan_depends_on_changes_the_key(order):
    x = torch.zeros(2, 3)
    variants = {
        "shape": [torch.zeros(3, 2), True],
        "dtype": [x.double(), True],
        "grad": [x.clone().requires_grad_(), True],
        "flag": [x, False],
        "key": {0: x, 1: True},
        "kind": (x, True),
        "none": [x, None],
    }
    keys = [structure_key([x, True]), *(structure_key(variants[name]) for name in order)]
    assert len(set(keys)) == len(keys)


def test_values_strides_and_strings_do_not_change_the_key():
    one = {"x": torch.zeros(3, 3), "name": "a", "index": 3}
    other = {"x": torch.ones(3, 3).t(), "name": "b", "index": 4}
    assert structure_key(one) == structure_key(other)
    assert hash(structure_key(one)) == hash(structure_key(other))


def test_the_two_parts_of_an_odd_batch_have_two_keys():
    first, second, third = split_batch(nested(7), 3)
    assert structure_key(first) != structure_key(second)
    assert structure_key(second) == structure_key(third)


@pytest.mark.parametrize("wrap", [list, tuple])
def test_joined_batches_are_what_the_loader_would_have_made_at_once(wrap):
    """With texts, one for each sample, and what belongs to all samples."""
    data = [(torch.tensor([i, -i]), f"name {i}", {"y": float(i)}) for i in range(5)]

    def collated(part):
        x, names, rest = default_collate(part)
        return {"data": (x, wrap(names), rest), "scale": torch.tensor(0.5), "number": 7, "kinds": ["a", "b", "c"]}

    joined, expected = join_batches([collated(data[:2]), collated(data[2:4]), collated(data[4:])]), collated(data)
    (x, names, rest), (whole, all_names, all_rest) = joined.pop("data"), expected.pop("data")
    assert torch.equal(x, whole)
    assert torch.equal(rest["y"], all_rest["y"])
    assert names == all_names
    assert joined == expected
    parts = split_by((x, names), [2, 2, 1])
    assert [part[1] for part in parts] == [all_names[:2], all_names[2:4], all_names[4:]]


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([X, torch.zeros(2, 4)], ValueError, r"tensors \[2, 3\] of torch.float32, \[2, 4\] of torch.float32 in one"),
        ([X, X.double()], ValueError, r"\[2, 3\] of torch.float64 in one place"),
        ([(X, torch.zeros(3)), (X, torch.zeros(3))], ValueError, r"\[3\] of torch.float32, .*for 2, 2 samples"),
        ([{"x": X}, {"y": X}], ValueError, "2 batches of the loader .* have containers of different keys"),
        ([{"x": X, "epoch": 1}, {"x": X, "epoch": 2}], ValueError, "the values 1, 2 in one place"),
        ([(X, torch.tensor(1.0)), (X, torch.tensor(2.0))], ValueError, "of which one would count"),
        ([(X, 1), (X, None)], ValueError, "things of types NoneType, int in one place"),
        ([(X, slice(2)), (X, slice(2))], TypeError, "have a slice, which cannot be joined"),
    ],
)
def test_batches_that_are_not_of_one_form_are_not_joined(batches, error, message):
    with pytest.raises(error, match=message):
        join_batches(batches)
