import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hybrid.parallel.pipeline.blocks import block_names, find_block_lists, num_parameters


def linear(width=2):
    return nn.Linear(width, width, bias=False)  # width squared parameters


class Model(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def layers(number, width=2):
    return nn.ModuleList(linear(width) for _ in range(number))


@pytest.mark.parametrize(
    ("model", "lists"),
    [
        (Model(head=linear(), layers=layers(3)), ["layers"]),
        (Model(small=layers(2), layers=layers(3, 8)), ["layers"]),  # less than a tenth as many parameters
        (Model(encoder=Model(block=layers(2)), decoder=Model(block=layers(3))), ["encoder.block", "decoder.block"]),
        (Model(layers=nn.Sequential(linear(), nn.ReLU(), linear())), ["layers"]),
        (nn.Sequential(linear(), nn.ReLU(), linear()), [""]),
        (nn.Sequential(linear(), layers(12), linear()), ["1"]),  # one element dominates: the list in it is meant
        (Model(net=nn.Sequential(nn.Sequential(nn.Sequential(*layers(9)), nn.ReLU()), nn.ReLU())), ["net.0.0"]),
        (Model(stages=nn.ModuleList([layers(2), layers(2), layers(2)])), ["stages"]),
        (Model(branches=nn.ModuleDict({"a": linear(), "b": linear()})), []),
        (Model(layers=nn.ModuleList([linear()]), act=nn.Sequential(nn.ReLU(), nn.Tanh())), []),
        (Model(layers=nn.ModuleList([linear()] * 4)), []),
        (Model(), []),
    ],
    ids=[
        "list", "tiny list beside", "encoder and decoder", "Sequential", "the root", "dominant element",
        "nested three deep", "list of lists", "ModuleDict", "one element", "one layer four times", "empty",
    ],
)  # fmt: skip
def test_the_list_with_most_parameters_is_found(model, lists):
    assert find_block_lists(model) == lists


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 3, 9])), min_size=1, max_size=4),
    depth=st.integers(0, 2),
)
def test_found_lists_never_lie_in_each_other_and_have_two_blocks(sizes, depth):
    model = Model(**{f"list{i}": layers(number, width) for i, (number, width) in enumerate(sizes)})
    for _ in range(depth):
        model = nn.Sequential(model, nn.ReLU())
    names = find_block_lists(model)
    assert not any(f"{a}.".startswith(f"{b}.") for a in names for b in names if a != b)
    assert all(len(list(model.get_submodule(name).children())) >= 2 for name in names)
    assert bool(names) == any(number >= 2 for number, _ in sizes)
    blocks = block_names(model, names)
    assert [id(model.get_submodule(name)) for name in blocks] == [
        id(child) for name in names for child in model.get_submodule(name)
    ]


def test_the_users_choice_is_taken_in_the_users_order():
    model = Model(encoder=layers(2), decoder=layers(2), tail=nn.Sequential(nn.ReLU()))
    assert find_block_lists(model, "tail") == ["tail"]
    assert find_block_lists(model, ["decoder", "encoder"]) == ["decoder", "encoder"]
    assert block_names(model, ["decoder", "encoder"]) == ["decoder.0", "decoder.1", "encoder.0", "encoder.1"]


def test_names_of_the_roots_own_elements_have_no_leading_dot():
    assert block_names(nn.Sequential(linear(), nn.ReLU()), [""]) == ["0", "1"]


def test_a_name_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"'model.layers' does not exist.*\['layers', 'layers.1'\]"):
        find_block_lists(Model(layers=nn.ModuleList([linear(), layers(2)])), "model.layers")


def test_a_name_of_something_else_is_refused_with_its_type():
    with pytest.raises(ValueError, match=r"'head' is a Linear; it must name an nn\.ModuleList or nn\.Sequential"):
        find_block_lists(Model(head=linear()), ["head"])


@pytest.mark.parametrize("names", [["layers", "layers"], ["layers", "layers.0"], ["", "layers"]])
def test_lists_that_share_blocks_are_refused(names):
    model = nn.Sequential()
    model.add_module("layers", nn.ModuleList([layers(2), layers(2)]))
    with pytest.raises(ValueError, match="layers"):
        find_block_lists(model, names)


def test_one_module_at_several_positions_is_refused():
    with pytest.raises(ValueError, match="layers holds one module at several positions"):
        block_names(Model(layers=nn.ModuleList([linear()] * 4)), ["layers"])


def test_shared_parameters_count_once():
    one, other = linear(3), linear(3)
    other.weight = one.weight
    assert num_parameters(nn.Sequential(one, other, nn.Linear(3, 1))) == 9 + 4
