from collections import Counter, OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_hybrid.functional.trees import flatten, leaves_of, map_leaves, unflatten

Pair = namedtuple("Pair", "first second")

TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2), st.frozensets(st.integers(), max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers()), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(tree=TREES)
def test_a_tree_is_rebuilt_from_its_leaves_with_the_same_types(tree):
    rebuilt = unflatten(*flatten(tree))
    assert rebuilt == tree
    assert repr(rebuilt) == repr(tree)  # == does not tell a named tuple from a tuple


@given(tree=TREES)
def test_the_description_depends_on_the_structure_only_and_is_a_key(tree):
    _, node = flatten(tree)
    _, other = flatten(map_leaves(lambda leaf: object(), tree))
    assert node == other
    assert hash(node) == hash(other)


def test_leaves_come_in_the_order_of_the_containers():
    assert leaves_of({"b": [1, (2, Pair(3, 4))], "a": 5}) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("tree", "leaves"), [(7, [7]), (None, [None]), ([], []), ({}, []), ((), []), ([[], {}], [])])
def test_a_leaf_is_a_tree_and_empty_containers_have_none(tree, leaves):
    assert leaves_of(tree) == leaves
    assert unflatten(*flatten(tree)) == tree


@pytest.mark.parametrize(
    "leaf", ["text", b"bytes", {1, 2}, torch.Size([2, 3]), range(3), SimpleNamespace(x=1), type("Mine", (list,), {})()]
)
def test_what_is_no_plain_container_is_one_leaf(leaf):
    assert leaves_of([leaf]) == [leaf]


def test_strings_are_leaves_although_they_can_be_iterated():
    assert leaves_of(["ab", ("c",)]) == ["ab", "c"]


@pytest.mark.parametrize("mapping", [OrderedDict(b=1, a=[2]), Counter(a=1), BatchEncoding({"input_ids": 1, "n": (2,)})])
def test_mappings_keep_their_type_keys_and_order(mapping):
    doubled = map_leaves(lambda x: 2 * x, mapping)
    assert type(doubled) is type(mapping)
    assert list(doubled.items()) == [(key, map_leaves(lambda x: 2 * x, value)) for key, value in mapping.items()]


def test_a_default_dictionary_survives():
    tree = defaultdict(list, a=[1])
    assert map_leaves(lambda x: x + 1, tree) == {"a": [2]}


def test_outputs_of_transformers_are_rebuilt_with_attributes_and_without_absent_fields():
    hidden = torch.ones(2)
    output = BaseModelOutput(last_hidden_state=hidden)
    leaves, node = flatten(output)
    assert len(leaves) == 1
    rebuilt = unflatten([hidden * 3], node)
    assert isinstance(rebuilt, BaseModelOutput)
    assert rebuilt.last_hidden_state.tolist() == [3, 3]
    assert rebuilt.attentions is None


def test_equal_structures_of_different_container_types_have_different_descriptions():
    nodes = [flatten(tree)[1] for tree in ([1, 2], (1, 2), Pair(1, 2), {"first": 1, "second": 2}, {0: 1, 1: 2})]
    assert len(set(nodes)) == 5


def test_the_named_results_of_torch_are_containers():
    top = torch.tensor([3.0, 1.0, 2.0]).topk(2)
    leaves, node = flatten(top)
    assert [leaf.tolist() for leaf in leaves] == [[3, 2], [0, 2]]
    rebuilt = unflatten([leaf + 1 for leaf in leaves], node)
    assert type(rebuilt) is type(top)
    assert rebuilt.values.tolist() == [4, 3]


def test_mapping_over_leaves_leaves_the_tree_itself_alone():
    tree = {"a": [1, 2]}
    mapped = map_leaves(str, tree)
    assert tree == {"a": [1, 2]}
    assert mapped == {"a": ["1", "2"]}
    assert mapped["a"] is not tree["a"]
