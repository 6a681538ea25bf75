"""Operations on parts give the values and gradients of the whole, and only those without a rule gather."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.testing import assert_close

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.tensor.axis import TensorAxis, take
from lightning_hybrid.parallel.tensor.install import RULES
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, split_of, whole, wrap
from tests.launch import run_ranks

NUM_RULES = len(RULES)  # importing them has registered them
B, T, C, H, D = 2, 6, 12, 6, 2  # batch, length, width, heads, head width


def heads(x, n=H):
    return x.view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)


def attention(qkv, mask=None):
    """As it stands in many blocks, with a fused projection."""
    b, t, c = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (x.view(b, t, H, c // H).transpose(1, 2) for x in qkv.split(c, dim=2))
    att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
    att = att.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1)[None, None], float("-inf"))
    att = F.softmax(att, dim=-1)
    y = att @ v if mask is None else (att + mask) @ v
    return y.transpose(1, 2).contiguous().view(b, t, c)


def by_head(qkv):
    """Fused, with the heads outermost."""
    b, t, c = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(b, t, H, 3 * c // H).transpose(1, 2).chunk(3, dim=-1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)


def five_dims(qkv):
    b, t, c = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.reshape(b, t, 3, H, c // H).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def grouped(q, k, v):
    k, v = (x[:, :, None].expand(B, H, 2, T, D).reshape(B, 2 * H, T, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, -1).contiguous()


def rotated(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1) * torch.arange(T).view(T, 1) + x


def complex_rotary(x):
    angles = torch.linspace(0, 3, T * D // 2, dtype=torch.float64).view(T, D // 2)
    turned = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def written(x):
    y = x * 2
    y[:, 1:3] = 0.5
    y[..., 0, :] = x[..., 1, :]
    y += 1
    return y.mul_(3)


def rms_norm(x, w):
    variance = x.to(torch.float64).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-6))


def watched(x):
    """With a hook that needs the whole gradient."""
    y = x * 1
    y.register_hook(lambda gradient: gradient / (1 + (gradient**2).sum()))
    return y


LAST, SEQ, HEADS, FUSED = Split(2, (C,)), Split(1, (T,)), Split(1, (H,)), Split(2, (C, C, C))
ROWS, COLUMNS, VOCAB = Split(0, (24,)), Split(1, (24,)), Split(1, (15,))
x, qkv, q = (B, T, C), (B, T, 3 * C), (B, H, T, D)
OPERATIONS = {  # name: (function, one (shape, split) for each argument)
    "pointwise": (lambda a, b: F.gelu(a) * torch.sigmoid(b) + a / 2 - b**2, [(x, LAST), (x, LAST)]),
    "plain operand": (lambda a, b: a + b, [(x, LAST), (x, None)]),
    "plain first": (lambda a, b: a * b, [(x, None), (x, SEQ)]),
    "broadcast scale": (lambda a, b: a * b, [(x, SEQ), ((C,), None)]),
    "broadcast scale over heads": (lambda a, b: a * b, [(q, HEADS), ((H, 1, 1), None)]),
    "position bias": (lambda a, b: (a + b).softmax(-1), [((B, H, T, T), HEADS), ((1, H, T, T), None)]),
    "reflected": (lambda a: 1 - a + (2 * a) ** 3 + 2.0**a, [(x, LAST)]),
    "where": (lambda a, b: torch.where(a > 0, a, b).clamp(min=-0.5), [(x, SEQ), (x, None)]),
    "written": (written, [(x, LAST)]),
    "rotary": (rotated, [(q, HEADS)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (C,), w, b), [(x, SEQ), ((C,), None), ((C,), None)]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (C,), w), [(x, SEQ), ((C,), None)]),
    "rms_norm by hand": (rms_norm, [(x, SEQ), ((C,), None)]),
    "norm of heads": (lambda a, w: F.layer_norm(a, (D,), w), [(q, HEADS), ((D,), None)]),
    "fused": (attention, [(qkv, FUSED)]),
    "fused with bias": (attention, [(qkv, FUSED), ((1, H, T, T), None)]),
    "fused by head": (by_head, [(qkv, Split(2, (3 * C,)))]),
    "fused in five dimensions": (five_dims, [(qkv, FUSED)]),
    "grouped": (grouped, [((B, 2 * H, T, D), Split(1, (2 * H,))), (q, HEADS), (q, HEADS)]),
    "grouped by torch": (
        lambda a, b: F.scaled_dot_product_attention(a, b, b, enable_gqa=True),
        [((B, 2 * H, T, D), Split(1, (2 * H,))), (q, HEADS)],
    ),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, dim=1).cumsum(2), [(q, HEADS)]),
    "sdpa with mask": (
        lambda a, m: F.scaled_dot_product_attention(a, a, a, attn_mask=m),
        [(q, HEADS), ((1, 1, T, T), None)],
    ),
    "sdpa with mask of heads": (
        lambda a, m: F.scaled_dot_product_attention(a, a, a, attn_mask=m),
        [(q, HEADS), ((H, T, T), None)],
    ),
    "column": (F.linear, [(x, None), ((24, C), ROWS), ((24,), ROWS)]),
    "column of a shard": (F.linear, [(x, SEQ), ((24, C), ROWS), ((24,), ROWS)]),
    "row": (F.linear, [((B, T, 24), Split(2, (24,))), ((C, 24), COLUMNS), ((C,), None)]),
    "row of a plain input": (F.linear, [((B, T, 24), None), ((C, 24), COLUMNS), ((C,), None)]),
    "plain weight on a shard": (F.linear, [(x, SEQ), ((24, C), None), ((24,), None)]),
    "mlp": (
        lambda a, w, v: F.linear(F.relu(F.linear(a, w)).pow(2), v),
        [(x, None), ((24, C), ROWS), ((C, 24), COLUMNS)],
    ),
    "gate and up in one": (
        lambda a, w, v: F.linear(F.silu((g := F.linear(a, w).chunk(2, dim=-1))[0]) * g[1], v),
        [(x, None), ((24, C), Split(0, (12, 12))), ((C, 12), Split(1, (12,)))],
    ),
    "matmul heads": (lambda a, b: a @ b.mT, [(q, HEADS), (q, HEADS)]),
    "matmul columns": (lambda a, b: a @ b, [(x, None), ((C, 24), Split(1, (24,)))]),
    "matmul rows": (lambda a, b: torch.matmul(a, b), [(x, LAST), ((C, 5), Split(0, (C,)))]),
    "matmul plain weight": (lambda a, b: a @ b, [(x, SEQ), ((C, 5), None)]),
    "bmm": (lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1).mT), [(q, HEADS), (q, HEADS)]),
    "baddbmm": (
        lambda a, i: torch.baddbmm(i, a.reshape(B * H, T, D), a.reshape(B * H, T, D).mT, beta=0.5, alpha=2),
        [(q, HEADS), ((1, T, T), None)],
    ),
    "addmm": (lambda b, a, w: torch.addmm(b, a.view(-1, C), w), [((9,), None), (x, LAST), ((C, 9), Split(0, (C,)))]),
    "einsum": (lambda a, b: torch.einsum("bhtd,bhsd->bhts", a, b), [(q, HEADS), (q, HEADS)]),
    "einsum sum": (lambda a, b: torch.einsum("btc,cd->btd", a, b), [(x, LAST), ((C, 5), None)]),
    "sum and mean": (lambda a: a.sum(-1) + a.mean((1,)).sum() + a.mean(), [(x, LAST)]),
    "sum over shards": (lambda a: a.sum(dim=1, keepdim=True) + a.mean(1, keepdim=True), [(x, SEQ)]),
    "largest": (lambda a: a.max(dim=-1).values + a.amax(-1) + a.std(-1), [(x, SEQ)]),
    "flattened shard": (lambda a: a.view(-1, C).relu().view(B, T, C), [(x, SEQ)]),
    "flattened heads": (lambda a: a.reshape(B * H, T, D).view(B, H, T, D).permute(0, 2, 1, 3), [(q, HEADS)]),
    "unflatten": (lambda a: a.unflatten(-1, (H, D)).flatten(-2).unsqueeze(1).squeeze(1), [(x, LAST)]),
    "stack and unbind": (lambda a, b: torch.stack([a, b], 1).unbind(1)[1], [(x, LAST), (x, LAST)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [(x, LAST), (x, None)]),
    "cat of sections": (lambda a, b: attention(torch.cat([a, b, a], -1)), [(x, LAST), (x, LAST)]),
    "einops-like": (lambda a: a.reshape(B, T, H, D).movedim(2, 1).swapaxes(2, 3), [(x, LAST)]),
    "slices": (lambda a: a[:, :, None][..., :-1] + a[:, :, 0:1, None] * a[-1, :, 3][None, :, None, None], [(x, SEQ)]),
    "embedding": (lambda w: F.embedding(torch.arange(15).view(3, 5), w, padding_idx=4), [((15, 4), Split(0, (15,)))]),
    "log_softmax": (lambda a: F.log_softmax(a, -1) + a.softmax(1), [((7, 15), VOCAB)]),
    "gather of classes": (lambda a: a.log_softmax(-1).gather(-1, torch.arange(7)[:, None]), [((7, 15), VOCAB)]),
    "argmax": (lambda a: a * a.argmax(-1, keepdim=True) + a.argmax(0), [((7, 15), VOCAB)]),
    "largest class": (lambda a: a.max(-1).values + torch.max(a, dim=1, keepdim=True).indices[:, 0], [((7, 15), VOCAB)]),
    "another type": (lambda a: a.type(torch.float32).type("torch.DoubleTensor") * a, [(x, LAST)]),
    "type of another": (
        lambda a: a.to(torch.ones(5, 7, 7, 7, 7, dtype=torch.double)) * a.type_as(torch.ones(C, T).double()),
        [(q, HEADS)],
    ),
    "names of NumPy": (lambda a: a.sum(axis=0, keepdims=True) + torch.softmax(a, axis=-1).amax(axis=0), [(x, SEQ)]),
    "first argument by name": (
        lambda a, w: F.layer_norm(input=torch.cat(tensors=[a, a], dim=-1), normalized_shape=(2 * C,), weight=w),
        [(x, SEQ), ((2 * C,), None)],
    ),
    "where by name": (lambda a: torch.where(condition=a > 0, input=a, other=2 * a), [(x, SEQ)]),
    "flipped": (lambda a: a.flip(0, 2) + a.flip([2]) + a.flip(dims=(0,)), [(x, SEQ)]),
    "type of a softmax": (lambda a: torch.softmax(a.float(), 1, torch.float64) + a, [((7, 15), VOCAB)]),
    "z-loss": (lambda a: a.logsumexp(-1).pow(2) + torch.logsumexp(a, (1,), keepdim=True)[:, 0], [((7, 15), VOCAB)]),
    "logsumexp elsewhere": (lambda a: a.logsumexp(0), [((7, 15), VOCAB)]),
    "triangle": (lambda a: (a @ a.mT).tril().triu(-2), [(q, HEADS)]),
    "complex rotary": (complex_rotary, [(q, HEADS)]),
    "nll": (lambda a: F.nll_loss(F.log_softmax(a, 1), torch.arange(7)), [((7, 15), VOCAB)]),
}
OPERATIONS |= {
    "by keyword": (lambda a: torch.softmax(input=a, dim=-1) + torch.cat(tensors=[a, a], dim=0)[:B], [(x, SEQ)]),
    "type": (lambda a: a.type(torch.float64).mean(1), [(x, SEQ)]),
    "watched gradient": (watched, [(x, SEQ)]),
}
TARGET = torch.tensor([0, 14, -100, 3, 7, 8, 2])
for key, options in {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.linspace(0.1, 2, 15, dtype=torch.float64)},
    "ignored": {"ignore_index": 3},
}.items():
    target = TARGET.masked_fill(TARGET == -100, 3) if key == "ignored" else TARGET
    OPERATIONS[f"cross_entropy {key}"] = (
        partial(lambda a, **o: F.cross_entropy(a, **o), target=target, **options),
        [((7, 15), VOCAB)],
    )
GATHERED = {
    "flipped dimensions one by one": (lambda a: a.flip(0, 1), [(x, SEQ)]),
    "renormalised slices": (lambda a: a.renorm(2, 0, 1.0), [(x, SEQ)]),
    "argmin": (lambda a: a * a.argmin(1, keepdim=True), [(q, HEADS)]),
    "two splits": (lambda a, b: a + b, [(x, SEQ), (x, LAST)]),
    "a view that mixes": (lambda a: a.transpose(1, 2).reshape(B, -1, 4), [(x, Split(1, (T,)))]),
    "convolution": (lambda a, w: F.conv1d(a, w), [((B, C, T), Split(1, (C,))), ((3, C, 2), None)]),
    "into a tensor": (
        lambda a: torch.relu(a) + torch.matmul(a.detach(), torch.ones(C, C).double(), out=_out()),
        [(x, LAST)],
    ),
    "torch.embedding": (lambda w: torch.embedding(w, torch.arange(15)), [((15, 4), Split(0, (15,)))]),
    "broadcast index": (lambda a: torch.take_along_dim(a, torch.tensor([[3]]), 1), [((7, 15), VOCAB)]),
    "cut through a section": (lambda a: a[:, 1:4].sum(1), [(x, SEQ)]),
}


def _out():
    return torch.empty(B, T, C, dtype=torch.float64)


def deal_out(value, split, axis):
    """A leaf and how the function sees it."""
    part = value if split is None else axis.part(value, split)
    leaf = part.detach().clone().requires_grad_()
    return leaf, (leaf if split is None else wrap(leaf, split, axis))


def results(function, arguments, axis, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape, _ in arguments]
    leaves = [value.clone().requires_grad_() for value in wholes]
    expected = function(*leaves)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    (expected * weights).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pairs = [deal_out(value, split, axis) for value, (_, split) in zip(wholes, arguments, strict=True)]
        output = function(*(seen for _, seen in pairs))
        shape = tuple(output.shape)
        output = whole(output)
        (output * weights).sum().backward()
    assert shape == tuple(expected.shape)
    assert_close(output, expected, rtol=1e-11, atol=1e-12)
    for (leaf, _), reference, (_, split) in zip(pairs, leaves, arguments, strict=True):
        gradient = reference.grad if split is None else axis.part(reference.grad, split)
        assert_close(leaf.grad, gradient, rtol=1e-11, atol=1e-12)
    return [str(w.message) for w in caught if "no rule for parts" in str(w.message)]


def check_all(names, table):
    axis, problems = TensorAxis(dist.group.WORLD), {}
    for name in names:
        function, arguments = table[name]
        try:
            problems[name] = results(function, arguments, axis)
        except Exception as error:  # the others are to be seen too
            problems[name] = f"{type(error).__name__}: {str(error)[:600]}"
    return problems


@pytest.mark.parametrize("size", [2, 3])
def test_parts_give_values_and_gradients_of_the_whole(size):
    for problems in run_ranks(size, _check_operations):
        assert {name: problem for name, problem in problems.items() if problem} == {}


def _check_operations():
    return check_all(OPERATIONS, OPERATIONS)


def test_operations_without_a_rule_gather_and_warn_once_on_the_first_rank():
    for rank, problems in enumerate(run_ranks(2, _check_gathered)):
        assert {name: len(found) for name, found in problems.items()} == dict.fromkeys(GATHERED, 1 - rank), problems


def _check_gathered():
    return check_all(GATHERED, GATHERED)


class Odd(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.matrix_norm(x)


def _place_of_the_warning():
    axis = TensorAxis(dist.group.WORLD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Odd()(wrap(torch.ones(2, 3), Split(1, (6,)), axis))
    return [(str(w.message).split(" on ")[0], w.filename, w.lineno) for w in caught]


def test_the_warning_is_of_the_line_of_the_users_that_gathers():
    line = Odd.forward.__code__.co_firstlineno + 1
    assert run_ranks(2, _place_of_the_warning) == [[("Odd calls linalg_matrix_norm", __file__, line)], []]


def _write_into(function, split, message):
    axis = TensorAxis(dist.group.WORLD)
    value = wrap(torch.ones(2, 3), split, axis)
    with pytest.raises(RuntimeError, match=message):
        function(value)


def _writes_that_have_no_rule():
    warnings.simplefilter("ignore")
    split = Split(1, (6,))
    _write_into(lambda x: x.index_fill_(1, torch.tensor([0]), 1.0), split, "writes with index_fill_ into a tensor of")
    _write_into(lambda x: x[:, 1:4].zero_(), split, "writes with zero_ into a view")
    _write_into(lambda x: x.__setitem__((slice(None), 1), 2.0), split, "writes with __setitem__")
    _write_into(lambda x: torch.add(torch.ones(2, 6), 1, out=x), split, "writes with add")
    _write_into(lambda x: x.data_ptr(), split, "custom kernel")


def test_writes_that_would_be_lost_are_refused():
    run_ranks(2, _writes_that_have_no_rule)


def _attributes():
    part, split = torch.arange(6.0).view(2, 3), Split(1, (6,))
    value = wrap(part, split, TensorAxis(dist.group.WORLD))
    value.data.mul_(2)
    assert part.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert (tuple(value.shape), value.size(1), value.dim(), value.numel(), len(value), value.stride()) == (
        (2, 6), 6, 2, 12, 2, (6, 1),
    )  # fmt: skip
    assert "part=tensor" in repr(value)
    assert isinstance(value.detach(), SplitTensor)
    assert split_of(value.to(torch.float64).contiguous()) == split
    assert [tuple(leaf.shape) for leaf in leaves_of(list(value.split(1)))] == [(1, 6), (1, 6)]


def test_a_part_tells_the_geometry_of_the_whole():
    run_ranks(2, _attributes)


def penalised(part):
    """Gradients of the gradient of a small network with a dealt-out loss, by its input."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((B, T, C), (24, C), (C, 24), (15, C))]
    x, up, down, head = (tensor.requires_grad_() for tensor in tensors)
    shown = [part(up, ROWS), part(down, COLUMNS), part(head, Split(0, (15,)))]
    h = F.linear(F.gelu(F.linear(part(x * 1, SEQ), shown[0])), shown[1])
    scores = F.linear(h + part(x, SEQ), shown[2]).log_softmax(-1).exp()
    (gradient,) = torch.autograd.grad((scores**3).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [x.grad, up.grad, down.grad, head.grad]


def _penalties():
    axis = TensorAxis(dist.group.WORLD)

    def part(tensor, split):
        return wrap(take(tensor, split, axis), split, axis)

    assert_close(penalised(part), penalised(lambda tensor, _: tensor), rtol=1e-10, atol=1e-12)


def test_a_gradient_can_be_differentiated():
    run_ranks(2, _penalties)


def _class_indices_alone():
    axis, leaf, target = TensorAxis(dist.group.WORLD), torch.ones(3, 2, requires_grad=True), torch.zeros(3).long()
    logits = wrap(leaf, Split(1, (4,)), axis)
    with pytest.raises(ValueError, match="batchmean is not a valid value for reduction"):
        F.cross_entropy(logits, target, reduction="batchmean")
    loss = F.cross_entropy(logits, target)
    with pytest.raises(RuntimeError, match="The cross-entropy of split logits cannot be differentiated twice"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_a_split_loss_refuses_what_it_cannot_do():
    run_ranks(2, _class_indices_alone)


def _late_gradients():
    """Of parameters whose gradients the ranks sum later: value, gradient and largest difference for each use."""
    axis, generator = TensorAxis(dist.group.WORLD), torch.Generator().manual_seed(0)
    value = torch.randn(T, C, dtype=torch.float64, generator=generator)
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((B, T, C), (24, C)))
    uses = {
        "added": lambda p, part: part(x, SEQ) + p,
        "column": lambda p, part: F.linear(p, part(weight, ROWS)),
        "row": lambda p, part: F.linear(p, part(weight[:C], Split(1, (C,)))),
        "summed over": lambda p, part: part(x, LAST) @ p.mT,
        "einsum": lambda p, part: torch.einsum("btc,tc->bt", part(x, LAST), p),
    }
    for use in uses.values():
        whole_leaf, leaf = value.clone().requires_grad_(), value.clone().requires_grad_()
        expected = use(whole_leaf, lambda tensor, split: tensor)
        expected.pow(2).sum().backward()
        result = whole(use(wrap(leaf, None, axis), lambda tensor, split: wrap(axis.part(tensor, split), split, axis)))
        result.pow(2).sum().backward()
        assert_close(result, expected)
        assert_close(axis.sum(leaf.grad), whole_leaf.grad)


def test_gradients_that_are_summed_later_are_not_summed_before():
    run_ranks(2, _late_gradients)


def _input_that_comes_to_need_a_gradient():
    axis, weight = TensorAxis(dist.group.WORLD), torch.arange(8.0).view(4, 2)
    given, part = torch.ones(3, 2), wrap(axis.part(weight, Split(0, (4,))), Split(0, (4,)), axis)
    with axis.step():
        F.linear(given, part)
        F.linear(given.requires_grad_(), part).sum().backward()
    assert given.grad.tolist() == [[12.0, 16.0]] * 3


def test_an_input_that_comes_to_need_a_gradient_enters_anew():
    run_ranks(2, _input_that_comes_to_need_a_gradient)


def _loss_in_bfloat16():
    axis, rows = TensorAxis(dist.group.WORLD), 1027  # 1028 in bfloat16
    logits = torch.zeros(rows, 4, dtype=torch.bfloat16)
    target, split = torch.zeros(rows, dtype=torch.long), Split(1, (4,))
    leaf = axis.part(logits, split).clone().requires_grad_()
    loss = F.cross_entropy(wrap(leaf, split, axis), target, reduction="sum")
    mean = F.cross_entropy(wrap(leaf, split, axis), target)
    exact = F.cross_entropy(logits.double(), target, reduction="sum")
    assert (loss.dtype, mean.dtype) == (torch.bfloat16, torch.bfloat16)
    assert_close(loss, exact.bfloat16(), rtol=0, atol=0)
    assert_close(mean, (exact / rows).bfloat16(), rtol=0, atol=0)


def test_a_loss_of_bfloat16_is_rounded_once():
    run_ranks(2, _loss_in_bfloat16)
