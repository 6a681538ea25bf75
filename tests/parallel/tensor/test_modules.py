"""Modules that nobody rewrote compute with slices of their parameters, and give the gradients of the whole."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.axis import TensorAxis
from lightning_hybrid.parallel.tensor.install import install
from lightning_hybrid.parallel.tensor.parallel import TensorParallel
from lightning_hybrid.parallel.tensor.split_tensor import wrap
from tests.launch import run_ranks
from tests.parity_models import in_full_precision

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 4, 7, 33


def column(name, width, *, sections=1, bias=True):
    split = Split(0, (width // sections,) * sections)
    return Assignment(name, "colwise", {"weight": split, **({"bias": split} if bias else {})})


def row(name, width, *, bias=True):
    return Assignment(name, "rowwise", {"weight": Split(1, (width,))}, ("bias",) if bias else ())


def norm(name, *parameters):
    return Assignment(name, "sequence", {}, parameters)


class FusedBlock(nn.Module):
    """With a fused projection that has biases, and a Conv1D in its MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.temperature = nn.Parameter(torch.linspace(0.5, 2, HEADS).view(HEADS, 1, 1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q * self.temperature, k, v, is_causal=True)
        x = x + self.scale * self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    @staticmethod
    def plan(name):
        up, down = Split(1, (4 * WIDTH,)), Split(0, (4 * WIDTH,))
        return [
            column(f"{name}.qkv", 3 * WIDTH, sections=3),
            row(f"{name}.out", WIDTH),
            Assignment(f"{name}.up", "colwise", {"weight": up, "bias": up.moved(0)}),
            Assignment(f"{name}.down", "rowwise", {"weight": down}, ("bias",)),
            norm(f"{name}.norm1", "weight", "bias"),
            norm(f"{name}.norm2", "weight", "bias"),
        ]


class TorchBlock(nn.TransformerEncoderLayer):
    """Torch's own, with the options that a test chooses."""

    options = {"batch_first": True}  # noqa: RUF012 - a constant

    def __init__(self):
        super().__init__(WIDTH, HEADS, 3 * WIDTH, dropout=0.0, **self.options)

    @staticmethod
    def plan(name):
        splits = {
            "in_proj_weight": Split(0, (WIDTH,) * 3),
            "in_proj_bias": Split(0, (WIDTH,) * 3),
            "out_proj.weight": Split(1, (WIDTH,)),
        }
        return [
            Assignment(f"{name}.self_attn", "heads", splits, ("out_proj.bias",)),
            column(f"{name}.linear1", 3 * WIDTH),
            row(f"{name}.linear2", 3 * WIDTH),
            norm(f"{name}.norm1", "weight", "bias"),
            norm(f"{name}.norm2", "weight", "bias"),
        ]


class SequenceFirst(TorchBlock):
    """Torch's default, and norms before."""

    options = {"norm_first": True}  # noqa: RUF012 - a constant


class WholeAttention(TorchBlock):
    """Its attention is left whole: under sequence parallelism it gathers."""

    @staticmethod
    def plan(name):
        return [Assignment(f"{name}.self_attn", "replicated"), *TorchBlock.plan(name)[1:]]


class Language(nn.Module):
    """Blocks between an embedding and a tied head."""

    def __init__(self, block):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = False

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def plan_of(model):
    rows = Split(0, (VOCABULARY,))
    blocks = [a for i, block in enumerate(model.blocks) for a in type(block).plan(f"blocks.{i}")]
    return [Assignment("embed", "vocab", {"weight": rows}), *blocks]


class LlamaLoss(nn.Module):
    """Grouped-query attention from transformers."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
        attention = {"num_attention_heads": 8, "num_key_value_heads": 4, "attn_implementation": "sdpa"}
        self.model = in_full_precision(LlamaForCausalLM(LlamaConfig(**sizes, **attention, pad_token_id=0)))
        self.checkpointed = False

    def forward(self, tokens):
        if self.checkpointed:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].flatten())


def llama_plan(model):
    plan = [
        Assignment(f"model.{n}", "vocab", {"weight": Split(0, (VOCABULARY,))})
        for n in ("model.embed_tokens", "lm_head")
    ]
    for i in range(2):
        layer = f"model.model.layers.{i}"
        plan += [column(f"{layer}.self_attn.q_proj", 16, bias=False)]
        plan += [column(f"{layer}.self_attn.{name}_proj", 8, bias=False) for name in "kv"]
        plan += [row(f"{layer}.self_attn.o_proj", 16, bias=False)]
        plan += [column(f"{layer}.mlp.{name}_proj", 24, bias=False) for name in ("gate", "up")]
        plan += [row(f"{layer}.mlp.down_proj", 24, bias=False)]
        plan += [norm(f"{layer}.{name}_layernorm", "weight") for name in ("input", "post_attention")]
    return plan


MODELS = {
    "fused": (lambda: Language(FusedBlock), plan_of, "blocks"),
    "torch": (lambda: Language(TorchBlock), plan_of, "blocks"),
    "sequence first": (lambda: Language(SequenceFirst), plan_of, "blocks"),
    "whole attention": (lambda: Language(WholeAttention), plan_of, "blocks"),
    "llama": (LlamaLoss, llama_plan, "model.model.layers"),
}


def compare(name, sequence, *, checkpointed=False):
    """Largest difference of losses and gradients, and what was warned of."""
    make, plan, blocks = MODELS[name]
    torch.manual_seed(1)
    model = make().double()
    tokens = torch.randint(VOCABULARY, (3, LENGTH))
    tensor_parallel = copy.deepcopy(model)
    expected = model(tokens)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}

    axis, assignments = TensorAxis(dist.group.WORLD), plan(tensor_parallel)
    tensor = TensorParallel(tensor_parallel, assignments, axis)
    run = [f"{blocks}.{i}" for i in range(2)]
    install(tensor_parallel, [run], tensor, assignments, sequence_parallel=sequence)
    tensor_parallel.checkpointed = checkpointed
    with warnings.catch_warnings(record=True) as caught, axis.step():
        warnings.simplefilter("always")
        loss = tensor_parallel(tokens)
        loss.backward()
    assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    for n, p in tensor_parallel.named_parameters():
        if sequence and n in tensor.deferred:
            dist.all_reduce(p.grad)
        assert_close(p.grad, tensor.part(n, gradients[n]), rtol=1e-9, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}")
    return [str(w.message) for w in caught if "no rule for parts" in str(w.message)]


def compare_all(names, sequence, checkpointed):
    problems = {}
    for name in names:
        try:
            problems[name] = compare(name, sequence, checkpointed=checkpointed)
        except Exception as error:  # the others are to be seen too
            problems[name] = f"{type(error).__name__}: {str(error)[:900]}"
    return problems


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sequence", [False, True, "regather"])
def test_modules_give_the_gradients_of_the_whole(sequence, checkpointed):
    for problems in run_ranks(2, compare_all, list(MODELS), sequence, checkpointed):
        assert {name: problem for name, problem in problems.items() if problem} == {}


def autocast(sequence):
    """The type of what a block returns, and how far its values are from the whole's."""
    torch.manual_seed(1)
    model = Language(FusedBlock)
    tokens = torch.randint(VOCABULARY, (3, LENGTH))
    tensor_parallel = copy.deepcopy(model)
    axis, assignments = TensorAxis(dist.group.WORLD), plan_of(tensor_parallel)
    tensor = TensorParallel(tensor_parallel, assignments, axis)
    install(tensor_parallel, [["blocks.0", "blocks.1"]], tensor, assignments, sequence_parallel=sequence)
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16), axis.step():
        loss = tensor_parallel(tokens)
        loss.backward()
        of_blocks = tensor_parallel.blocks[1](tensor_parallel.blocks[0](x))
        expected, of_whole = model(tokens), model.blocks[1](model.blocks[0](x))
        assert (loss.dtype, of_blocks.dtype) == (expected.dtype, of_whole.dtype)
    assert_close(of_blocks, of_whole, rtol=0.05, atol=0.05)
    return float((loss - expected).detach())


@pytest.mark.parametrize("sequence", [False, True, "regather"])
def test_autocast_gives_the_types_of_the_whole(sequence):
    for difference in run_ranks(2, autocast, sequence):
        assert abs(difference) < 0.02  # 8 bits of a loss of 3.6


def deferred_on_a_whole():
    torch.manual_seed(0)
    model, assignments, x = nn.Sequential(nn.LayerNorm(4)), [norm("0", "weight", "bias")], torch.randn(2, 4)
    expected = copy.deepcopy(model)
    expected(x).square().sum().backward()
    axis = TensorAxis(dist.group.WORLD)
    install(model, [], TensorParallel(model, assignments, axis), assignments, sequence_parallel=True)
    with axis.step():
        model(x).square().sum().backward()
        assert isinstance(model(x), torch.Tensor)
    for parameter, whole in zip(model.parameters(), expected.parameters(), strict=True):
        dist.all_reduce(parameter.grad)  # as at the end of a window
        assert_close(parameter.grad, whole.grad)
    assert isinstance(model[0].weight, nn.Parameter)
    copied = copy.deepcopy(model)
    assert list(copied.state_dict()) == ["0.weight", "0.bias"]


def test_a_parameter_for_shards_makes_its_gradient_of_a_whole_activation_once():
    run_ranks(2, deferred_on_a_whole)


def added_by_hand():
    bias, split = torch.ones(3, requires_grad=True), Split(1, (4,))
    axis = TensorAxis(dist.group.WORLD)
    rows, columns = wrap(torch.ones(2, 2), split, axis), wrap(torch.ones(2, 3), Split(0, (4,)), axis)
    torch.addmm(wrap(bias, None, axis), rows, columns).sum().backward()
    dist.all_reduce(bias.grad)
    assert bias.grad.tolist() == [2.0] * 3


def test_a_bias_for_shards_counts_once_in_a_sum_over_ranks():
    run_ranks(2, added_by_hand)


def short_sequence():
    model = Language(FusedBlock)
    axis, assignments = TensorAxis(dist.group.WORLD), plan_of(model)
    install(
        model, [["blocks.0", "blocks.1"]], TensorParallel(model, assignments, axis), assignments, sequence_parallel=True
    )
    with axis.step(), torch.no_grad():
        assert model(torch.zeros(1, 2, dtype=torch.long)).isfinite()
    with axis.step(), pytest.raises(RuntimeError, match="cannot deal out a sequence of 1 to 2 ranks"):
        model(torch.zeros(1, 2, dtype=torch.long))


def test_a_sequence_shorter_than_the_axis_is_refused_in_training():
    run_ranks(2, short_sequence)


class Hidden(torch.autograd.Function):
    """What torch functions do not see: it gets a part and returns one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone() * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Doubled(nn.Module):
    """Calls it."""

    def forward(self, x):
        return Hidden.apply(x)


def custom_function(replicated):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Doubled(), nn.Linear(8, 4)).double()
    x, whole = torch.randn(3, 4, dtype=torch.float64), copy.deepcopy(model)
    whole(x).sum().backward()
    assignments = [column("0", 8), row("2", 8), *([Assignment("1", "replicated")] if replicated else [])]
    axis = TensorAxis(dist.group.WORLD)
    tensor = TensorParallel(model, assignments, axis)
    install(model, [], tensor, assignments, sequence_parallel=False)
    with axis.step():
        if not replicated:
            with pytest.raises(RuntimeError, match=r"torch.autograd.Function.*'replicated'"):
                model(x).sum().backward()
            return
        model(x).sum().backward()
    for name, parameter in whole.named_parameters():
        assert_close(model.get_parameter(name).grad, tensor.part(name, parameter.grad))


@pytest.mark.parametrize("replicated", [False, True])
def test_a_function_that_hides_from_torch_is_refused_or_gets_wholes(replicated):
    run_ranks(2, custom_function, replicated)


class ShiftedNorm(nn.Module):
    """A norm that computes with one more than its weight, as Gemma's does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight.double()).view(1, -1)


def shifted(sequence):
    torch.manual_seed(0)
    model = nn.Sequential(ShiftedNorm(), nn.Linear(WIDTH, WIDTH)).double()
    x, whole = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), copy.deepcopy(model)
    whole(x).pow(2).sum().backward()
    assignments = [norm("0", "weight")]
    axis = TensorAxis(dist.group.WORLD)
    tensor = TensorParallel(model, assignments, axis)
    install(model, [["0", "1"]], tensor, assignments, sequence_parallel=sequence)
    with axis.step():
        model(x).pow(2).sum().backward()
        if not sequence:
            return
        (model[0].weight * 2).sum().backward()
    whole[0].weight.grad += 2
    dist.all_reduce(model[0].weight.grad)
    for name, parameter in whole.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_made_of_a_deferred_parameter_is_deferred(sequence):
    run_ranks(2, shifted, sequence)
