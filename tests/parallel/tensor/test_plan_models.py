"""The automatic plan on models of transformers, with their plans and without."""

import ast
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn

from lightning_hybrid.functional.splits import Split
from tests.parallel.tensor.planned import Root, at, blocks_of, plan, styles

COMMON = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
LLAMA = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
IN_AND_OUT = {"net.model.embed_tokens": "vocab", "net.lm_head": "vocab"}


def gpt2(**keywords):
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    return hf.GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=4, n_positions=12, **ids, **keywords)


def t5(**keywords):
    return hf.T5Config(vocab_size=24, d_model=16, d_kv=4, d_ff=40, num_layers=2, num_heads=4, **keywords)


def vit():
    sizes = {k: v for k, v in COMMON.items() if k in {"hidden_size", "intermediate_size", "num_hidden_layers"}}
    return hf.ViTConfig(**sizes, num_attention_heads=4, image_size=8, patch_size=4)


def on_meta(kind, config):
    with torch.device("meta"):
        return Root(net=kind(config))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)),
        (hf.MistralForCausalLM, hf.MistralConfig(**GROUPED)),
        (hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=4)),  # norms on heads get no style
    ],
)
def test_models_with_a_plan_keep_to_it(kind, config):
    assert styles(on_meta(kind, config)) == {**IN_AND_OUT, **LLAMA}


def test_configuration_tells_the_plan_where_the_model_does_not():
    root = on_meta(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED))
    for module in root.modules():
        if hasattr(module, "tp_plan"):
            module._tp_plan = {}
    assert styles(root) == {**IN_AND_OUT, **LLAMA}


def test_gpt2_is_split_by_our_rules():
    root = on_meta(hf.GPT2LMHeadModel, gpt2())
    assert styles(root) == {
        "net.transformer.wte": "vocab",
        "attn.c_attn": "fused_qkv",
        "attn.c_proj": "rowwise",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
        "net.lm_head": "vocab",
    }
    fused = at(plan(root), "h.0.attn.c_attn")
    assert fused.splits == {"weight": Split(1, (16, 16, 16)), "bias": Split(0, (16, 16, 16))}
    assert at(plan(root), "h.0.attn.c_proj").splits == {"weight": Split(0, (16,))}


def test_vit_is_split_inside_its_blocks_alone():
    assert styles(on_meta(hf.ViTForImageClassification, vit())) == {
        "attention.q_proj": "colwise",
        "attention.k_proj": "colwise",
        "attention.v_proj": "colwise",
        "attention.o_proj": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
    }


@pytest.mark.parametrize(("projection", "ways"), [("relu", ["wi"]), ("gated-gelu", ["wi_0", "wi_1"])])
def test_t5_is_split_in_both_halves(projection, ways):
    root = Root(net=hf.T5ForConditionalGeneration(t5(feed_forward_proj=projection, tie_word_embeddings=True)))
    found = {each.module.removeprefix("net."): each.style for each in plan(root)}
    words = {name for name, style in found.items() if style == "vocab"}
    assert {"shared", "lm_head"} <= words
    for attention in ("encoder.block.1.layer.0.SelfAttention", "decoder.block.1.layer.1.EncDecAttention"):
        assert [found[f"{attention}.{name}"] for name in "qkvo"] == ["colwise"] * 3 + ["rowwise"]
    for mlp in ("encoder.block.0.layer.1.DenseReluDense", "decoder.block.1.layer.2.DenseReluDense"):
        assert all(found[f"{mlp}.{name}"] == "colwise" for name in ways)
        assert found[f"{mlp}.wo"] == "rowwise"
    assert len(found) == len(words) + 2 * (4 + len(ways) + 1) + 2 * (8 + len(ways) + 1)


def test_layers_of_bert_stand_each_in_a_module_of_its_own():
    root = Root(net=hf.BertForMaskedLM(hf.BertConfig(**{**COMMON, "num_hidden_layers": 3})))
    assert styles(root) == {
        "net.bert.embeddings.word_embeddings": "vocab",
        "attention.self.query": "colwise",
        "attention.self.key": "colwise",
        "attention.self.value": "colwise",
        "attention.output.dense": "rowwise",
        "intermediate.dense": "colwise",
        "output.dense": "rowwise",
        "net.cls.predictions.decoder": "vocab",
    }


def test_gpt_neox_interleaves_so_that_one_section_holds_whole_heads():
    root = on_meta(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**COMMON))
    assert styles(root)["attention.query_key_value"] == "colwise"
    assert at(plan(root), "layers.0.attention.query_key_value").splits["weight"] == Split(0, (48,))


def test_bloom_interleaves_without_a_plan_of_its_own():
    config = hf.BloomConfig(vocab_size=24, hidden_size=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    found = styles(on_meta(hf.BloomForCausalLM, config))
    assert found["self_attention.query_key_value"] == "colwise"
    assert found["self_attention.dense"] == found["mlp.dense_4h_to_h"] == "rowwise"


def test_phi3_is_split_by_our_rules_since_its_plan_gathers():
    root = on_meta(hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED))
    assert styles(root) == {
        **IN_AND_OUT,
        "self_attn.qkv_proj": "fused_qkv",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_up_proj": "fused_gate_up",
        "mlp.down_proj": "rowwise",
    }
    assert at(plan(root), "layers.0.self_attn.qkv_proj").splits == {"weight": Split(0, (16, 8, 8))}
    assert at(plan(root), "layers.1.mlp.gate_up_proj").splits == {"weight": Split(0, (40, 40))}


def test_experts_stay_whole_with_the_models_word_for_them():
    root = on_meta(hf.MixtralForCausalLM, hf.MixtralConfig(**GROUPED))
    experts = at(plan(root), "layers.0.mlp.experts")
    assert (experts.style, experts.splits) == ("replicated", {})
    assert "moe_tp_experts" in experts.note
    assert at(plan(root), "layers.0.self_attn.q_proj").style == "colwise"


@pytest.mark.parametrize(
    ("kind", "config", "numbers"),
    [
        (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), "4 query heads and 2 key-value heads"),
        (hf.GPT2LMHeadModel, gpt2(), "4 query heads and 4 key-value heads"),
        (hf.ViTForImageClassification, vit(), "4 query heads and 4 key-value heads"),
        (hf.T5ForConditionalGeneration, t5(), "4 query heads and 4 key-value heads"),
        (hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED), "4 query heads and 2 key-value heads"),
        (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**COMMON), "4 query heads and 4 key-value heads"),
    ],
)
def test_heads_that_do_not_divide_are_an_error_with_the_numbers(kind, config, numbers):
    with pytest.raises(ValueError, match=f"{numbers}, which tensor_parallel_size=8 does not divide") as raised:
        plan(on_meta(kind, config), size=8)
    assert "Sizes that divide both: [2" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_given_plans_are_held_to_whole_heads_too():
    root = on_meta(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED))
    with pytest.raises(ValueError, match=r"2 key-value heads, which tensor_parallel_size=4 .* both: \[2\]"):
        plan(root, size=4, given={"*.q_proj": "colwise", "*.o_proj": "rowwise"})
    assert plan(root, size=4, given={"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"})


def test_plan_of_the_model_without_what_does_not_divide():
    root = on_meta(hf.LlamaForCausalLM, hf.LlamaConfig(**{**GROUPED, "intermediate_size": 41}))
    mlp = at(plan(root), "layers.0.mlp")
    assert (mlp.style, mlp.splits) == ("replicated", {})
    assert "no multiples of 2" in mlp.note
    assert at(plan(root), "layers.0.self_attn.q_proj").style == "colwise"


def test_styles_are_of_modules_that_exist_and_of_sizes_that_fit():
    root = Root(net=hf.GPT2LMHeadModel(gpt2()), other=nn.Linear(3, 3))
    for assignment in plan(root, size=4):
        for name, split in assignment.splits.items():
            assert root.get_submodule(assignment.module).get_parameter(name).shape[split.dim] == split.length
    assert len(blocks_of(root)) == 2


def test_the_plan_that_the_documentation_writes_out_is_the_automatic_one_of_a_llama():
    text = (Path(__file__).parents[3] / "docs" / "tensor.md").read_text()
    given = ast.literal_eval(re.search(r"^plan = (\{.*?^\})", text, flags=re.MULTILINE | re.DOTALL)[1])
    with torch.device("meta"):
        root = Root(net=hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    sizes = {"size": 2, "sequence_parallel": True}
    assert plan(root, given=given, **sizes) == plan(root, **sizes)
