"""Initial values of models on the meta device: by name and seed alone, complete, and as eager layers have them."""

import random

import pytest
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

from lightning_hybrid.parallel.meta.initialising import Initialiser, has_meta
from lightning_hybrid.parallel.meta.materialising import initialise_whole, initialised, without_meta
from lightning_hybrid.parallel.streams import derived_seed

CPU = torch.device("cpu")
WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 2), nn.BatchNorm1d(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.embed.weight


def on_meta(kind=Model):
    with torch.device("meta"):
        return kind()


def initialiser(root, blocks=("blocks.0", "blocks.1", "blocks.2")):
    made = Initialiser(root, blocks)
    made.check()
    return made


def values(made, seed=1, parts=None):
    parts = parts or dict.fromkeys(made.parts.values())
    return {name: tensor for part in parts for name, tensor in made.make(part, seed, CPU).items()}


def test_a_module_starts_from_a_seed_of_its_name():
    found = values(initialiser(on_meta()))
    torch.manual_seed(derived_seed(1, "initialise", "blocks.1.attention.out_proj"))
    expected = nn.Linear(WIDTH, WIDTH)
    assert torch.equal(found["blocks.1.attention.out_proj.weight"], expected.weight)
    assert not torch.equal(found["blocks.1.attention.in_proj_weight"], found["blocks.2.attention.in_proj_weight"])
    assert not found["blocks.1.attention.out_proj.bias"].any()  # by the attention, which comes after its child
    assert torch.equal(found["blocks.0.norm.running_var"], torch.ones(WIDTH))
    assert found["blocks.0.norm.num_batches_tracked"] == 0


def test_order_repetition_and_other_parts_make_no_difference():
    made = initialiser(on_meta())
    first, parts = values(made), list(dict.fromkeys(made.parts.values()))
    assert parts == ["embed", "head", "blocks.0", "blocks.1", "blocks.2"]
    assert_close(values(made, parts=parts[::-1]), first, rtol=0, atol=0)
    assert_close(values(initialiser(on_meta(), ())), first, rtol=0, atol=0)
    other = values(made, seed=2)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_every_tensor_is_made_once_under_its_first_name():
    root = on_meta()
    made = initialiser(root)
    names = [name for name, _ in [*root.named_parameters(), *root.named_buffers()]]
    assert sorted(values(made)) == sorted(names)
    assert made.first["head.weight"] == "embed.weight"


def test_the_model_and_random_streams_are_left_alone():
    root = on_meta()
    before, streams = {name: id(p) for name, p in root.named_parameters()}, (torch.get_rng_state(), random.getstate())
    flat = [id(weight) for weight in root.blocks[0].lstm._flat_weights]
    values(initialiser(root))
    assert {name: id(p) for name, p in root.named_parameters()} == before
    assert [id(weight) for weight in root.blocks[0].lstm._flat_weights] == flat
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]


def test_a_whole_model_is_made_in_one_process_and_may_be_let_go_of():
    root, other = on_meta(), on_meta()
    initialise_whole(root, 1, CPU)
    assert root.head.weight is root.embed.weight
    root.blocks[0].lstm(torch.randn(2, 3, WIDTH))
    with initialised(other, 1, CPU):
        assert_close(dict(other.state_dict()), dict(root.state_dict()), rtol=0, atol=0)
    assert all(p.is_meta for p in other.parameters())
    assert other.head.weight is other.embed.weight


def test_what_is_real_keeps_its_values():
    root = on_meta()
    root.blocks[0].norm.weight = nn.Parameter(torch.full((WIDTH,), 3.0))
    root.head = nn.Linear(WIDTH, 5)
    kept = root.head.weight.clone()
    initialise_whole(root, 1, CPU)
    assert torch.equal(root.head.weight, kept)
    assert torch.equal(root.blocks[0].norm.weight, torch.full((WIDTH,), 3.0))
    assert not has_meta(root)


def test_types_and_strides_are_the_models():
    root = on_meta()
    root.embed.weight.data = root.embed.weight.data.double().t().contiguous().t()
    assert values(initialiser(root))["embed.weight"].stride() == (1, 5)
    assert values(initialiser(root))["embed.weight"].dtype == torch.float64


def test_a_model_can_be_moved_without_what_it_has_on_the_meta_device():
    root = on_meta()
    root.head = nn.Linear(WIDTH, 5)
    with without_meta(root):
        root.to("cpu", torch.float64)
    assert root.head.bias.dtype == torch.float64
    assert root.embed.weight.is_meta
    assert [name for name, _ in root.named_parameters()] == [name for name, _ in Model().named_parameters()][:1] + [
        name for name, _ in root.named_parameters()
    ][1:]


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(WIDTH))


class Convention(nn.Module):
    """Its method is given each module, and knows that the head is another."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Shifted() for _ in range(2)), nn.Linear(WIDTH, 2)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 5.0 if module is self.head else 0.02)
        elif isinstance(module, Shifted):
            module.shift.data = torch.full_like(module.shift, 7.0)


class Around(nn.Module):
    """The nearest method counts."""

    def __init__(self):
        super().__init__()
        self.model = Convention()

    def _init_weights(self, module):
        assert module is self


def test_the_nearest_module_with_init_weights_has_the_last_word():
    found = values(initialiser(on_meta(Around), ("model.blocks.0", "model.blocks.1")))
    assert 0.01 < found["model.blocks.1.inner.weight"].std() < 0.03
    assert found["model.head.weight"].std() > 2
    assert (found["model.blocks.0.shift"] == 7).all()
    assert found["model.head.bias"].any()  # by the layer itself


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers_have_the_scale_of_those_that_are_built_at_once(kind):
    if kind == "llama":
        config = hf.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        build, blocks = (lambda: hf.LlamaForCausalLM(config)), [f"model.layers.{i}" for i in range(2)]
    else:
        config = hf.GPT2Config(
            vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        build, blocks = (lambda: hf.GPT2LMHeadModel(config)), [f"transformer.h.{i}" for i in range(2)]
    root, eager = on_meta(build), build()
    initialiser(root, blocks)
    initialise_whole(root, 1, CPU, blocks)
    real = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    found = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    assert found.keys() == real.keys()
    for name, tensor in found.items():
        if tensor.ndim > 1:
            assert tensor.std().item() == pytest.approx(real[name].std().item(), rel=0.1), name
        else:
            assert_close(tensor, real[name])


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.bias = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))


class Half(Bare):
    def reset_parameters(self):
        nn.init.zeros_(self.bias)


class Attribute(Bare):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(3)


class Looks(Bare):
    """Cannot run on the meta device."""

    def reset_parameters(self):
        for tensor in (self.table, self.bias):
            tensor.fill_(1.0 + len(torch.ones(2).tolist()))
            assert tensor.sum().item() == 9


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Bare,
            r"0\.table is on the meta.*Bare\.reset_parameters\(\).*0\.table, 0\.bias \(2 tensors\).*Give the class",
        ),
        (
            Half,
            r"0\.table is on the meta.*Half\.reset_parameters\(\).*0\.table \(1 tensors\).*torch\.device\('cpu'\)",
        ),
        (Attribute, r"0\.mask is a tensor on the meta device, and neither a parameter nor a buffer.*register_buffer"),
    ],
)
def test_what_nothing_initialises_is_refused_by_name(kind, words):
    with pytest.raises(ValueError, match=words):
        initialiser(on_meta(lambda: nn.Sequential(kind(), nn.Linear(2, 2))), ())


def test_an_initialiser_that_looks_at_values_is_trusted():
    assert (values(initialiser(on_meta(Looks), ()))["table"] == 3).all()


class Whole(nn.Module):
    """As `nn.Transformer` does, it initialises all that is in it; it also replaces a parameter of each block."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Shifted() for _ in range(3)), nn.Linear(WIDTH, 2)

    def _reset_parameters(self):
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.uniform_(parameter, 5.0, 6.0)
        for block in self.blocks:
            block.shift = nn.Parameter(torch.full_like(block.shift, 7.0))


def test_a_module_around_the_blocks_has_the_last_word_in_each_part():
    names = [f"blocks.{i}" for i in range(3)]
    root = on_meta(Whole)
    made = initialiser(root, names)
    found = values(made)
    for name in ("blocks.0.inner.weight", "blocks.1.inner.weight", "head.weight"):
        assert 5 <= found[name].min() < found[name].max() <= 6
    assert (found["blocks.2.shift"] == 7).all()
    assert 0 < found["head.bias"].abs().max() < 1  # by the layer itself
    assert not torch.equal(found["blocks.0.inner.weight"], found["blocks.1.inner.weight"])
    again = values(initialiser(root, names), parts=["head", *reversed(names)])
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
    assert all(parameter.is_meta for parameter in root.parameters())


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 2, 2, 2, 16, batch_first=True)


def test_torchs_transformer_starts_as_it_does_when_built_at_once():
    blocks = [f"inner.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)]
    found, eager = values(initialiser(on_meta(Transformer), blocks)), Transformer().state_dict()
    assert found.keys() == eager.keys()
    for name, tensor in ((name, tensor) for name, tensor in found.items() if tensor.ndim > 1):
        assert tensor.abs().max().item() == pytest.approx(eager[name].abs().max().item(), rel=0.15), name


class Copies(Whole):
    def _reset_parameters(self):
        super()._reset_parameters()
        self.head.weight.mul_(self.blocks[0].shift[:2, None])


class Decides(Whole):
    def _reset_parameters(self):
        if self.head.weight.sum() > 0:
            nn.init.zeros_(self.head.weight)


@pytest.mark.parametrize("kind", [Copies, Decides])
def test_a_module_around_the_blocks_that_reads_other_parts_is_refused(kind):
    """A product with what has no values would leave a tensor as it is, without an error."""
    with pytest.raises(ValueError, match=rf"the model \({kind.__name__}\) contains blocks.*once for each part.*'cpu'"):
        values(initialiser(on_meta(kind)))
