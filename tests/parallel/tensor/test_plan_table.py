"""The plan as people read it."""

import torch
import transformers as hf
from torch import nn

from lightning_hybrid.parallel.tensor.plan import plan_table
from tests.parallel.tensor.planned import WIDTH, WORDS, FusedBlock, Root, SwiGLUBlock, plan, stack


def table(root, size=2, given="auto", *, sequence_parallel=False):
    return plan_table(root, plan(root, size, given, sequence_parallel=sequence_parallel), size).splitlines()


def test_equal_blocks_are_one_row():
    with torch.device("meta"):
        config = hf.LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=40, num_hidden_layers=96, num_attention_heads=4
        )
        root = Root(net=hf.LlamaForCausalLM(config))
    lines = table(root, 4, sequence_parallel=True)
    assert len(lines) == 14
    assert "net.model.layers.{0..95}.mlp.up_proj               colwise   weight 10x16 of 40x16" in lines
    assert "net.model.layers.{0..95}.mlp.down_proj             rowwise   weight 16x10 of 16x40" in lines
    assert "net.model.layers.{0..95}.input_layernorm           sequence  weight whole, summed late" in lines


def test_blocks_that_differ_stand_apart():
    wide = [SwiGLUBlock(), SwiGLUBlock(wide=64), SwiGLUBlock(), SwiGLUBlock()]
    lines = table(Root(layers=nn.ModuleList(wide)))
    assert [line.split()[0] for line in lines if "w1" in line] == [
        "layers.{0,2,3}.feed_forward.w1",
        "layers.1.feed_forward.w1",
    ]


def test_lists_in_lists_are_one_row():
    def stage():
        return Root(blocks=nn.ModuleList([SwiGLUBlock(), SwiGLUBlock()]))

    lines = table(Root(stages=nn.ModuleList([stage(), stage(), stage()])))
    assert [line.split()[0] for line in lines if "w2" in line] == ["stages.{0..2}.blocks.{0..1}.feed_forward.w2"]


def test_sections_and_reasons_are_told():
    root = stack(FusedBlock, position=nn.Embedding(WORDS, WIDTH))
    lines = table(root)
    fused = "weight 24x16 of 48x16 in 3 sections, bias 24 of 48 in 3 sections"
    assert f"layers.{{0..1}}.attn.c_attn  fused_qkv  {fused}" in lines
    assert "position                   whole      weight 24x16: no rule or pattern covers it" in lines
    given = table(root, given={"*.c_attn": "colwise"})
    assert any("c_attn  colwise" in line and line.endswith("would give each rank whole heads") for line in given)
    whole = table(stack(lambda: SwiGLUBlock(wide=33)))
    assert "layers.{0..1}.feed_forward  replicated  whole: its 33 features are no multiple of 2" in whole


def test_bytes_of_split_parameters_and_of_whole_ones():
    root = stack(lambda: SwiGLUBlock(wide=64), depth=2, embed=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, WORDS))
    root.head.weight = root.embed.weight
    of = 4 * (2 * (3 * 64 * WIDTH + 2 * 64) + WORDS * WIDTH + WORDS)
    whole = 4 * 2 * 2 * WIDTH  # norms and row biases
    *_, first, second = lines = table(root)
    last = "these are totals of the whole model, whose stages are on 3 pipeline ranks"
    assert plan_table(root, plan(root), 2, pipeline=3).splitlines() == [*lines, last]
    assert first == f"split over 2 ranks: {of / 2048:.1f} KiB a rank of {of / 1024:.1f} KiB"
    assert second == f"replicated: {whole} B on every rank"


def test_model_that_is_one_module():
    assert table(nn.Linear(WORDS, WIDTH))[1].startswith("(model)  whole  weight 16x24")
