"""What sequence_parallel adds to a plan."""

import pytest
import torch
import transformers as hf
from torch import nn

from lightning_hybrid.parallel.tensor.plan import make_plan
from tests.parallel.tensor.planned import (
    HEADS,
    WIDE,
    WIDTH,
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


def added(root, given="auto", size=2):
    """What sequence parallelism adds and changes, by name: style and deferred parameters."""
    before = {each.module: each for each in plan(root, size, given)}
    after = plan(root, size, given, sequence_parallel=True)
    return {each.module: (each.style, each.deferred) for each in after if before.get(each.module) != each}


BOTH = ("weight", "bias")


def test_norms_and_row_biases_are_summed_late():
    root = Root(layers=nn.ModuleList([FusedBlock(), FusedBlock()]), norm=nn.LayerNorm(WIDTH))
    assert added(root) == {
        f"layers.{index}.{name}": what
        for index in (0, 1)
        for name, what in {
            "ln_1": ("sequence", BOTH),
            "ln_2": ("sequence", BOTH),
            "attn.c_proj": ("rowwise", ("bias",)),
            "mlp.c_proj": ("rowwise", ("bias",)),
        }.items()
    }


def test_layers_of_torch():
    found = added(Root(layers=nn.ModuleList([encoder_layer(), encoder_layer()])))
    assert {name.removeprefix("layers.0."): what for name, what in found.items() if "layers.0" in name} == {
        "self_attn": ("heads", ("out_proj.bias",)),
        "linear2": ("rowwise", ("bias",)),
        "norm1": ("sequence", BOTH),
        "norm2": ("sequence", BOTH),
    }
    unbiased = added(stack(lambda: encoder_layer(bias=False)))
    assert unbiased["layers.0.norm1"] == ("sequence", ("weight",))
    assert not {"layers.0.self_attn", "layers.0.linear2"} & unbiased.keys()


def test_norms_on_heads_are_no_matter_of_the_sequence():
    assert added(stack(GroupedBlock)) == {
        f"layers.{index}.{name}": what
        for index in (0, 1)
        for name, what in {"norm": ("sequence", ("weight",)), "wo": ("rowwise", ("bias",))}.items()
    }
    with torch.device("meta"):
        config = hf.Qwen3Config(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
        )
        root = Root(net=hf.Qwen3ForCausalLM(config))
    assert {name.rpartition(".")[2] for name in added(root)} == {"input_layernorm", "post_attention_layernorm"}


def test_norm_between_column_and_row_is_none_of_the_sequence_and_one_before_them_is():
    def between():
        up, down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)
        return Root(mlp=Root(norm=nn.LayerNorm(WIDTH), up=up, inner=nn.LayerNorm(WIDE), down=down))

    assert added(stack(between, depth=2)).keys() == {"layers.0.mlp.norm", "layers.1.mlp.norm"}

    def square():
        up, down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        return Root(mlp=nn.Sequential(nn.LayerNorm(WIDTH), up, nn.LayerNorm(WIDTH), down))

    assert added(stack(square)).keys() == {"layers.0.mlp.0", "layers.1.mlp.0"}


def test_norms_of_bert_stand_behind_its_row_layers():
    with torch.device("meta"):
        config = hf.BertConfig(
            vocab_size=24, hidden_size=16, intermediate_size=40, num_attention_heads=4, num_hidden_layers=2
        )
        root = Root(net=hf.BertForMaskedLM(config))
    assert {name.partition(".layer.0.")[2]: what for name, what in added(root).items() if ".layer.0." in name} == {
        "attention.output.LayerNorm": ("sequence", BOTH),
        "output.LayerNorm": ("sequence", BOTH),
        "attention.output.dense": ("rowwise", ("bias",)),
        "output.dense": ("rowwise", ("bias",)),
    }


def test_norms_by_their_names_and_not_those_that_mix_positions():
    class RMSNormOfOurs(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

    class OurNorm(RMSNormOfOurs):
        pass

    def block():
        return Root(a=OurNorm(), b=nn.GroupNorm(2, WIDTH), c=nn.BatchNorm1d(WIDTH), d=RMSNormOfOurs())

    found = styles(stack(block), sequence_parallel=True)
    assert found == {"a": "sequence", "b": "replicated", "c": "replicated", "d": "replicated"}
    assert at(plan(stack(block), sequence_parallel=True), "0.a").deferred == ("scale",)


def test_attention_that_stays_whole_sees_the_whole_sequence():
    given = {"mlp.0": "colwise", "mlp.2": "rowwise"}
    found = styles(stack(SeparateBlock), given=given, sequence_parallel=True)
    expected = {"attn": "replicated", "ln1": "sequence", "ln2": "sequence"}
    assert found == {**expected, "mlp.0": "colwise", "mlp.2": "rowwise"}
    torch_layers = styles(stack(encoder_layer), given={"linear1": "colwise"}, sequence_parallel=True)
    assert torch_layers["self_attn"] == "replicated"
    unknown = styles(stack(lambda: SeparateBlock(heads=None)), sequence_parallel=True)
    assert unknown["attn"] == "replicated"


def test_what_mixes_positions_is_whole_with_what_is_around_it():
    def block():
        mixer = Root(norm=nn.LayerNorm(WIDTH), conv=nn.Conv1d(WIDTH, WIDTH, 3), out=nn.Linear(WIDTH, WIDTH))
        return Root(mixer=mixer, conv=nn.Conv1d(WIDTH, WIDTH, 3), attn=nn.MultiheadAttention(WIDTH, HEADS))

    found = styles(stack(block), sequence_parallel=True)
    assert found == {"mixer": "replicated", "conv": "replicated", "attn": "heads"}


def test_experts_and_their_router_are_whole_as_one():
    with torch.device("meta"):
        config = hf.MixtralConfig(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        root = Root(net=hf.MixtralForCausalLM(config))
    found = styles(root, sequence_parallel=True)
    assert found["mlp"] == "replicated"
    assert not {"mlp.gate", "mlp.experts"} & found.keys()


def test_experts_see_chosen_tokens_and_sum_nothing_late():
    def block():
        experts = nn.ModuleList([Root(norm=nn.LayerNorm(WIDTH), mlp=SwiGLUBlock().feed_forward) for _ in range(2)])
        return Root(norm=nn.LayerNorm(WIDTH), moe=Root(gate=nn.Linear(WIDTH, 2), experts=experts))

    root = Root(layers=nn.ModuleList([block(), SwiGLUBlock()]))
    plan = make_plan(root, ["layers.0", "layers.1"], 2, "auto", sequence_parallel=True)
    found = {each.module: each for each in plan}
    assert found["layers.0.moe.experts.1.mlp.w2"].style == "rowwise"
    assert found["layers.0.moe.experts.1.mlp.w2"].deferred == ()
    assert "layers.0.moe.experts.1.norm" not in found
    assert found["layers.0.norm"].deferred == BOTH
    assert found["layers.1.feed_forward.w2"].deferred == ("bias",)


def test_sequence_by_pattern_holds_where_a_shard_of_it_is():
    root = Root(layers=nn.ModuleList([GroupedBlock(), GroupedBlock()]), norm=nn.LayerNorm(WIDTH))
    given = {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise", "*norm": "sequence"}
    found = plan(root, given=given, sequence_parallel=True)
    assert at(found, "layers.0.norm").deferred == ("weight",)
    on_heads, outside = at(found, "layers.0.q_norm"), found[-1]
    assert (on_heads.style, on_heads.deferred) == (outside.style, outside.deferred) == ("sequence", ())
    assert "shards of heads" in on_heads.note
    assert "outside the blocks" in outside.note


def test_norm_that_the_plan_replicates_is_left_alone():
    given = {"mlp.0": "colwise", "mlp.2": "rowwise", "ln1": "replicated"}
    found = plan(stack(SeparateBlock), given=given, sequence_parallel=True)
    assert (at(found, "0.ln1").style, at(found, "0.ln1").deferred) == ("replicated", ())
    assert at(found, "0.ln2").style == "sequence"


def test_models_without_blocks_are_refused():
    with pytest.raises(ValueError, match=r"sequence_parallel=True splits .* Put its layers in an nn.ModuleList"):
        plan(Root(only=FusedBlock()), sequence_parallel=True)
