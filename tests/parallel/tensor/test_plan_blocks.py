"""The automatic plan on blocks that people write themselves."""

import pytest
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
    encoder_layer,
    plan,
    stack,
    styles,
)

PAIR = {"mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}


@pytest.mark.parametrize(
    "names", [("c_attn", "c_proj"), ("qkv", "out"), ("Wqkv", "proj"), ("to_qkv", "to_out"), ("in_proj", "out_proj")]
)
def test_fused_projections_are_split_in_three_sections(names):
    root = stack(lambda: FusedBlock(names=names))
    assert styles(root) == {f"attn.{names[0]}": "fused_qkv", f"attn.{names[1]}": "rowwise", **PAIR}
    sections = (WIDTH,) * 3
    assert at(plan(root), f"0.attn.{names[0]}").splits == {"weight": Split(0, sections), "bias": Split(0, sections)}
    assert at(plan(root), f"0.attn.{names[1]}").splits == {"weight": Split(1, (WIDTH,))}


@pytest.mark.parametrize(
    "names",
    [
        ("key", "query", "value", "proj"),
        ("wq", "wk", "wv", "wo"),
        ("to_q", "to_k", "to_v", "to_out"),
        ("q_lin", "k_lin", "v_lin", "out_lin"),
        ("W_q", "W_k", "W_v", "W_o"),
        ("queries", "keys", "values", "unify"),
        ("c_q", "c_k", "c_v", "c_proj"),
        ("linear_q", "linear_k", "linear_v", "final"),  # no name of an output, but the one layer left has its shape
    ],
)
def test_separate_projections_are_known_by_name(names):
    *ways, out = sorted(names, key=lambda name: names.index(name) == 3)
    expected = {**dict.fromkeys((f"attn.{name}" for name in ways), "colwise"), f"attn.{out}": "rowwise"}
    assert styles(stack(lambda: SeparateBlock(names=names))) == {**expected, "mlp.0": "colwise", "mlp.2": "rowwise"}


def test_output_projection_may_stand_in_a_sequential():
    def block():
        made = SeparateBlock()
        made.attn.proj = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
        return made

    assert styles(stack(block))["attn.proj.0"] == "rowwise"


def test_grouped_query_attention_in_the_block_itself():
    expected = {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise"}
    assert styles(stack(GroupedBlock)) == expected
    with pytest.raises(ValueError, match="4 query heads and 2 key-value heads, which tensor_parallel_size=4"):
        styles(stack(GroupedBlock), size=4)


def test_gated_mlps_in_any_order():
    expected = {"feed_forward.w1": "colwise", "feed_forward.w2": "rowwise", "feed_forward.w3": "colwise"}
    assert styles(stack(SwiGLUBlock)) == expected


def test_fused_gate_and_up_are_two_halves():
    def block():
        return Root(mlp=Root(w12=nn.Linear(WIDTH, 2 * WIDE), w3=nn.Linear(WIDE, WIDTH)))

    assert styles(stack(block)) == {"mlp.w12": "fused_gate_up", "mlp.w3": "rowwise"}
    assert at(plan(stack(block)), "0.mlp.w12").splits["bias"] == Split(0, (WIDE, WIDE))


def test_multihead_attention_and_the_layers_of_torch():
    root = stack(encoder_layer)
    assert styles(root) == {"self_attn": "heads", "linear1": "colwise", "linear2": "rowwise"}
    thirds = Split(0, (WIDTH,) * 3)
    expected = {"in_proj_weight": thirds, "in_proj_bias": thirds, "out_proj.weight": Split(1, (WIDTH,))}
    assert at(plan(root), "0.self_attn").splits == expected
    decoder = stack(lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, WIDE, bias=False))
    assert styles(decoder)["multihead_attn"] == "heads"
    assert "in_proj_bias" not in at(plan(decoder), "0.self_attn").splits


def test_multihead_attention_with_other_widths_of_keys_and_values():
    root = stack(lambda: Root(attn=nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=10)))
    assert set(at(plan(root), "0.attn").splits) == {
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
    }


def test_multihead_attention_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn has 4 query heads"):
        plan(stack(encoder_layer), size=3)


@pytest.mark.parametrize(
    ("block", "name", "reason"),
    [
        (lambda: Root(attn=nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)), "attn", "bias_k"),
        (lambda: SeparateBlock(heads=None), "attn", "number of heads"),
        (lambda: FusedBlock(heads=None), "attn", "number of heads"),
        (lambda: SwiGLUBlock(wide=33), "feed_forward", "33 features are no multiple of 2"),
        (lambda: Root(mlp=Root(a=nn.Linear(WIDTH, WIDE), b=nn.Linear(WIDTH, WIDE))), "mlp", "no pairs"),
        (lambda: Root(adapter=Root(a=nn.Linear(WIDTH, 4), b=nn.Linear(4, WIDTH))), "adapter", "no pairs"),
        (
            lambda: Root(mixer=Root(conv=nn.Conv1d(3, 3, 1), a=nn.Linear(WIDTH, WIDE), b=nn.Linear(WIDE, WIDTH))),
            "mixer",
            "more than linear layers",
        ),
    ],
)
def test_what_no_rule_covers_stays_whole_with_the_reason(block, name, reason):
    found = at(plan(stack(block)), f"layers.1.{name}")
    assert (found.style, found.splits) == ("replicated", {})
    assert reason in found.note


def test_one_attention_head_as_a_module_has_no_output_projection():
    def block():
        head = Root(key=nn.Linear(WIDTH, 4), query=nn.Linear(WIDTH, 4), value=nn.Linear(WIDTH, 4))
        head.num_heads = 2
        return Root(heads=nn.ModuleList([head]), proj=nn.Linear(4, WIDTH))

    assert "no output projection" in at(plan(stack(block)), "layers.0.heads.0").note


def test_sizes_of_heads_tell_their_number():
    def block():
        made = SeparateBlock(heads=None)
        made.attn.head_dim = 4
        return made

    assert styles(stack(block))["attn.query"] == "colwise"
    with pytest.raises(ValueError, match="4 query heads"):
        styles(stack(block), size=8)


def test_square_layers_are_a_pair_in_a_sequential_alone():
    def square():
        return [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    assert styles(stack(lambda: Root(mlp=nn.Sequential(*square())))) == {"mlp.0": "colwise", "mlp.1": "rowwise"}
    assert styles(stack(lambda: Root(gates=Root(a=square()[0], b=square()[1])))) == {"gates": "replicated"}


def test_embedding_and_head_of_one_vocabulary_are_split_and_positions_are_not():
    root = stack(
        FusedBlock,
        tokens=nn.Embedding(WORDS, WIDTH),
        positions=nn.Embedding(WORDS, WIDTH),
        classifier=nn.Linear(WIDTH, 3),
        head=nn.Linear(WIDTH, WORDS),
    )
    outside = {name: style for name, style in styles(root).items() if style == "vocab"}
    assert outside == {"tokens": "vocab", "head": "vocab"}
    assert at(plan(root), "head").splits == {"weight": Split(0, (WORDS,)), "bias": Split(0, (WORDS,))}
    assert at(plan(root, size=4), "tokens").splits == {"weight": Split(0, (WORDS,))}


def test_vocabulary_need_not_divide():
    root = stack(FusedBlock, tokens=nn.Embedding(25, WIDTH), head=nn.Linear(WIDTH, 25))
    assert at(plan(root), "tokens").splits == {"weight": Split(0, (25,))}


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_embeddings_with_odd_lookups_and_those_without_a_head_stay_whole(option):
    root = stack(FusedBlock, tokens=nn.Embedding(WORDS, WIDTH, **option), head=nn.Linear(WIDTH, WORDS))
    assert "vocab" not in styles(root).values()
    assert "vocab" not in styles(stack(FusedBlock, tokens=nn.Embedding(WORDS, WIDTH))).values()


def test_without_blocks_the_rules_look_everywhere():
    root = Root(tokens=nn.Embedding(4 * WIDTH, WIDTH), only=FusedBlock(), head=nn.Linear(WIDTH, 4 * WIDTH))
    assert styles(root) == {
        "tokens": "vocab",
        "only.attn.c_attn": "fused_qkv",
        "only.attn.c_proj": "rowwise",
        **{f"only.{name}": style for name, style in PAIR.items()},
        "head": "vocab",
    }


def test_experts_written_as_mlps_are_split_each():
    def block():
        return Root(gate=nn.Linear(WIDTH, 2), experts=nn.ModuleList([SwiGLUBlock().feed_forward for _ in range(2)]))

    found = styles(Root(layers=nn.ModuleList(Root(moe=block()) for _ in range(4))))
    assert found["moe.experts.1.w1"] == "colwise"
    assert "moe.gate" not in found
