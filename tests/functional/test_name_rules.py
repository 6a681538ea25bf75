import pytest
import torch
from torch import nn

from lightning_hybrid.functional.name_rules import first_match, places, public_name


class RootNorm(nn.LayerNorm):
    pass


class Tree(nn.Module):
    """Named after no kind of norm, and itself no match for types."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm1": RootNorm(4), "up": nn.Linear(4, 4)})])
        self.head = torch.compile(nn.Linear(4, 5, bias=False), backend="eager")
        self.head.weight = self.embed.weight
        self._gain = nn.Linear(1, 1)
        self.bias = nn.Parameter(torch.zeros(4))


NAMES = {
    "embed.weight",
    "blocks.0.norm1.weight",
    "blocks.0.norm1.bias",
    "blocks.0.up.weight",
    "blocks.0.up.bias",
    "_gain.weight",
    "_gain.bias",
    "bias",
}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("head", {"embed.weight"}),  # tied, with its second name
        ("head.weight", {"embed.weight"}),  # as it is called without the compiler's wrapper
        ("head._orig_mod", {"embed.weight"}),
        ("norm*", {"blocks.0.norm1.weight", "blocks.0.norm1.bias"}),
        ("*.bias", {"blocks.0.norm1.bias", "blocks.0.up.bias", "_gain.bias"}),
        ("bias", {"blocks.0.norm1.bias", "blocks.0.up.bias", "_gain.bias", "bias"}),
        ("blocks.?.up", {"blocks.0.up.weight", "blocks.0.up.bias"}),
        ("0.up.b*", {"blocks.0.up.bias"}),
        ("_gain.weight", {"_gain.weight"}),
        ("[mn]orm1.[!b]*", {"blocks.0.norm1.weight"}),
        ("norm", set()),
        ("Head", set()),
        ("0.weight", set()),  # components between the two
        ("LayerNorm", {"blocks.0.norm1.weight", "blocks.0.norm1.bias"}),  # it derives from it
        ("*Norm", {"blocks.0.norm1.weight", "blocks.0.norm1.bias"}),
        ("ModuleList", {name for name in NAMES if name.startswith("blocks")}),
        ("Module", set()),
        ("Tree", set()),
        (nn.LayerNorm, {"blocks.0.norm1.weight", "blocks.0.norm1.bias"}),
        (nn.Linear, {"embed.weight", "blocks.0.up.weight", "blocks.0.up.bias", "_gain.weight", "_gain.bias"}),
        (nn.BatchNorm1d, set()),
        (Tree, set()),
    ],
)
def test_rule_is_about(rule, expected):
    tree = Tree()
    where = places(tree)
    names = {name: where[id(parameter)] for name, parameter in tree.named_parameters()}
    assert names.keys() == NAMES
    assert {name for name, place in names.items() if first_match([rule], place) == 0} == expected


def test_first_rule_that_matches_counts():
    tree = Tree()
    place = places(tree)[id(tree.blocks[0]["norm1"].bias)]
    assert first_match(["embed", nn.LayerNorm, "*.bias"], place) == 1
    assert first_match(["embed", "*.bias", nn.LayerNorm], place) == 1
    assert first_match({"*": 1, nn.LayerNorm: 0}, place) == 0
    assert first_match([], place) is None


def test_public_names_are_the_same_with_wrappers_and_without():
    assert public_name("_fsdp_wrapped_module.blocks.0._orig_mod.up.weight") == "blocks.0.up.weight"
