"""Plans that users write: what patterns match, what styles do, and what is refused."""

import pytest
import torch
import transformers as hf
from torch import nn

from lightning_hybrid.functional.splits import Split
from tests.parallel.tensor.planned import (
    HEADS,
    WIDE,
    WIDTH,
    WORDS,
    FusedBlock,
    GroupedBlock,
    Root,
    SeparateBlock,
    SwiGLUBlock,
    at,
    plan,
    stack,
    styles,
)


def gpt():
    return stack(SeparateBlock, embed=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, WORDS))


def refused(given, root=None, size=2, *, sequence_parallel=False):
    with pytest.raises(ValueError, match=r"\w") as raised:
        plan(gpt() if root is None else root, size, given, sequence_parallel=sequence_parallel)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("embed", {"embed"}),
        ("*.query", {"layers.0.attn.query", "layers.1.attn.query"}),
        ("query", {"layers.0.attn.query", "layers.1.attn.query"}),
        ("attn.query", {"layers.0.attn.query", "layers.1.attn.query"}),
        ("layers.1.*.query", {"layers.1.attn.query"}),
        ("layers.?.attn.[qk]*y", {f"layers.{n}.attn.{name}" for n in (0, 1) for name in ("query", "key")}),
    ],
)
def test_patterns_match_a_name_or_the_end_of_one(pattern, matched):
    style = "vocab" if pattern == "embed" else "colwise"
    assert {each.module for each in plan(gpt(), given={pattern: style})} == matched


def test_last_pattern_that_matches_counts():
    found = styles(gpt(), given={"query": "colwise", "mlp.0": "colwise", "layers.0.attn.query": "replicated"})
    assert found == {"attn.query": "replicated", "mlp.0": "colwise"}


def test_replicated_module_takes_out_all_that_lies_in_it():
    for given in ({"attn": "replicated", "query": "colwise"}, {"query": "colwise", "attn": "replicated"}):
        assert styles(gpt(), given=given) == {"attn": "replicated"}


def test_modules_without_parameters_are_passed_over():
    root = stack(lambda: Root(norm1=nn.LayerNorm(WIDTH), norm2=nn.Identity(), a=nn.Linear(WIDTH, WIDTH)))
    found = styles(root, given={"norm*": "sequence"}, sequence_parallel=True)
    assert found == {"norm1": "sequence"}


def test_every_style_splits_what_it_says():
    root = Root(
        layers=nn.ModuleList([FusedBlock(), FusedBlock()]),
        up=nn.Linear(WIDTH, 2 * WIDE),
        down=nn.Linear(WIDE, WIDTH),
        conv=hf.pytorch_utils.Conv1D(WIDE, WIDTH),
        back=hf.pytorch_utils.Conv1D(WIDTH, WIDE),
        mha=nn.MultiheadAttention(WIDTH, HEADS, bias=False),
        embed=nn.Embedding(WORDS + 1, WIDTH),
        head=nn.Linear(WIDTH, WORDS + 1),
    )
    given = {
        "c_attn": "fused_qkv",
        "up": "fused_gate_up",
        "down": "rowwise",
        "conv": "colwise",
        "back": "rowwise",
        "mha": "heads",
        "embed": "vocab",
        "head": "vocab",
    }
    found = {each.module: dict(each.splits) for each in plan(root, given=given)}
    thirds, vocabulary = Split(0, (WIDTH,) * 3), Split(0, (WORDS + 1,))
    assert found == {
        "layers.0.attn.c_attn": {"weight": thirds, "bias": thirds},
        "layers.1.attn.c_attn": {"weight": thirds, "bias": thirds},
        "up": {"weight": Split(0, (WIDE, WIDE)), "bias": Split(0, (WIDE, WIDE))},
        "down": {"weight": Split(1, (WIDE,))},
        "conv": {"weight": Split(1, (WIDE,)), "bias": Split(0, (WIDE,))},
        "back": {"weight": Split(0, (WIDE,))},
        "mha": {"in_proj_weight": thirds, "out_proj.weight": Split(1, (WIDTH,))},
        "embed": {"weight": vocabulary},
        "head": {"weight": vocabulary, "bias": vocabulary},
    }


def test_fused_sections_follow_grouped_heads():
    root = stack(lambda: Root(attn=Root(packed=nn.Linear(WIDTH, 32), out=nn.Linear(WIDTH, WIDTH))))
    for block in root.layers:
        block.attn.n_head, block.attn.n_kv_heads = 4, 2
    assert at(plan(root, given={"packed": "fused_qkv"}), "0.attn.packed").splits["weight"] == Split(0, (16, 8, 8))
    assert "2 key-value heads, which tensor_parallel_size=4" in refused({"packed": "fused_qkv"}, root, 4)


def test_the_automatic_plan_serves_where_a_pattern_leaves_it_a_module():
    root = stack(lambda: Root(up=nn.Linear(WIDTH, WIDE), act=nn.GELU(), down=nn.Linear(WIDE, WIDTH)))
    automatic = {a.module: a.style for a in plan(root)}
    assert automatic == {"layers.0.up": "colwise", "layers.0.down": "rowwise"} | {
        "layers.1.up": "colwise", "layers.1.down": "rowwise",
    }  # fmt: skip
    mixed = {a.module: a.style for a in plan(root, given={"*": "auto", "1.down": "replicated", "1.act": "replicated"})}
    expected = {**automatic, "layers.1.act": "replicated", "layers.1.down": "replicated"}
    assert mixed == expected


def test_unknown_module_is_refused_with_near_ones():
    assert "'*.queryy', which matches no module with parameters. Near it: query" in refused({"*.queryy": "colwise"})
    assert "Some of its modules: embed, head, layers" in refused({"zzzzzz": "colwise"})


def test_unknown_style_is_refused_with_all_of_them():
    message = refused({"query": "columnwise"})
    assert "tensor_parallel_plan['query']='columnwise' is not one of 'colwise', 'fused_qkv'" in message
    assert message.endswith("Did you mean 'colwise'?")


@pytest.mark.parametrize(
    ("pattern", "style", "kind"),
    [
        ("embed", "colwise", "Embedding"),
        ("embed", "rowwise", "Embedding"),
        ("mlp", "colwise", "Sequential"),
        ("ln1", "vocab", "LayerNorm"),
        ("ln1", "fused_gate_up", "LayerNorm"),
        ("attn", "heads", "Root"),
        ("layers.0", "fused_qkv", "SeparateBlock"),
    ],
)
def test_module_that_cannot_take_a_style_is_refused(pattern, style, kind):
    assert f"({kind}) the style '{style}', which is for" in refused({pattern: style})


def test_conv1d_is_no_head():
    root = Root(head=hf.pytorch_utils.Conv1D(WORDS, WIDTH))
    assert "head (Conv1D) the style 'vocab'" in refused({"head": "vocab"}, root)


def test_weights_that_are_not_a_layers_own_are_refused():
    root = Root(up=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDE)))
    assert "with a weight of its own" in refused({"up": "colwise"}, root)


def test_sequence_needs_parameters_and_sequence_parallel():
    assert "'ln1' the style 'sequence', which needs sequence_parallel=True" in refused({"ln1": "sequence"})
    assert "a module with parameters of its own" in refused({"mlp": "sequence"}, sequence_parallel=True)


def test_multihead_attention_is_split_as_one():
    root = Root(attn=nn.MultiheadAttention(WIDTH, HEADS))
    assert "give attn the style 'heads'" in refused({"out_proj": "rowwise"}, root)
    biased = Root(attn=nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True))
    assert "bias_k and bias_v" in refused({"attn": "heads"}, biased)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"w1": "colwise"}, "w1 has out_features=33, no multiple of tensor_parallel_size=2"),
        ({"w2": "rowwise"}, "w2 has in_features=33, no multiple of tensor_parallel_size=2"),
        ({"w1": "fused_gate_up"}, "w1 has out_features=33, no multiple of twice tensor_parallel_size=2"),
        ({"w1": "fused_qkv"}, "a section of queries, keys or values of=11, no multiple of tensor_parallel_size=2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(given, words):
    assert words in refused(given, stack(lambda: SwiGLUBlock(wide=33)))


def test_fused_layer_without_thirds_is_refused():
    assert "out_features=32, which are not three equal parts" in refused({"w1": "fused_qkv"}, stack(SwiGLUBlock))


def test_vocabulary_smaller_than_the_axis_is_refused():
    root = Root(kinds=nn.Embedding(2, WIDTH), scaled=nn.Embedding(WORDS, WIDTH, max_norm=1.0))
    assert "kinds has 2 rows, fewer than tensor_parallel_size=4" in refused({"kinds": "vocab"}, root, size=4)
    assert "max_norm=1.0" in refused({"scaled": "vocab"}, root)
    assert "sparse=True" in refused({"a": "vocab"}, Root(a=nn.Embedding(WORDS, WIDTH, sparse=True)))


def test_heads_that_do_not_divide_are_refused():
    assert "4 query heads and 2 key-value heads" in refused({"wq": "colwise"}, stack(GroupedBlock), size=4)
    assert "attn has 4 query heads and 4 key-value" in refused(
        {"attn": "heads"}, Root(attn=nn.MultiheadAttention(24, HEADS)), size=3
    )


def tied():
    root = gpt()
    root.head.weight = root.embed.weight
    return root


def test_tied_layer_follows_the_one_that_is_named():
    vocabulary = Split(0, (WORDS,))
    for name in ("embed", "head"):
        found = {each.module: each for each in plan(tied(), given={name: "vocab"})}
        assert {module: each.style for module, each in found.items()} == {"embed": "vocab", "head": "vocab"}
        assert found["head"].splits == {"weight": vocabulary, "bias": vocabulary}


def test_tied_layers_with_two_styles_are_refused():
    message = refused({"embed": "vocab", "head": "rowwise"}, tied())
    assert "embed" in message
    assert "head" in message
    assert "share one parameter" in message
    assert "Give both 'vocab', or split neither." in message
    assert "share one parameter" in refused({"head": "rowwise"}, tied())
    assert "share one parameter" in refused({"embed": "vocab", "head": "replicated"}, tied())


def test_bias_that_is_held_twice_is_split_once():
    with torch.device("meta"):
        config = hf.BertConfig(vocab_size=24, hidden_size=16, intermediate_size=40, num_attention_heads=4)
        root = Root(net=hf.BertForMaskedLM(config))
    found = plan(root, given={"word_embeddings": "vocab"})
    assert {each.module.rpartition(".")[2] for each in found} == {"word_embeddings", "decoder"}


def test_other_words_for_a_plan_are_refused():
    assert "tensor_parallel_plan='all' is neither 'auto' nor a dictionary" in refused("all")
