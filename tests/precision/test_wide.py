import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.precision.wide import OPERATIONS, WideOperations

NARROW = [torch.float16, torch.bfloat16]
ONES, ZEROS = torch.ones(8), torch.zeros(8)
WIDE = {
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: F.log_softmax(x, -1),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w, w),
    "group_norm": lambda x, w: F.group_norm(x, 2, w, w),
    "batch_norm": lambda x, w: F.batch_norm(x, ZEROS.clone(), ONES.clone(), w, w, True),
    "instance_norm": lambda x, w: F.instance_norm(x[None]),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w),
    "sum": lambda x, w: x.sum(),
    "mean": lambda x, w: x.mean(),
    "mean of a dimension": lambda x, w: x.mean(-1),
    "norm": lambda x, w: torch.linalg.vector_norm(x),
    "logsumexp": lambda x, w: x.logsumexp(-1),
    "power": lambda x, w: x**2,
    "variance": lambda x, w: x.var(),
    "mse_loss": lambda x, w: F.mse_loss(x, x.flip(0)),
    "l1_loss": lambda x, w: F.l1_loss(x, x.flip(0)),
    "smooth_l1_loss": lambda x, w: F.smooth_l1_loss(x, x.flip(0)),
    "huber_loss": lambda x, w: F.huber_loss(x, x.flip(0)),
    "cross_entropy": lambda x, w: F.cross_entropy(x, torch.tensor([0, 1, 2])),
    "nll_loss": lambda x, w: F.nll_loss(F.log_softmax(x, -1), torch.tensor([0, 1, 2])),
    "binary cross_entropy": lambda x, w: F.binary_cross_entropy_with_logits(x, w.expand(3, 8)),
    "kl_div": lambda x, w: F.kl_div(x, x.exp(), reduction="batchmean"),
}


@pytest.fixture
def held():
    WideOperations.hold()
    yield
    WideOperations.release()


def autocast(dtype):
    return torch.autocast("cpu", dtype=dtype, cache_enabled=False)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.usefixtures("held")
def test_sums_norms_and_losses_are_those_of_float32(name, dtype):
    x, w = torch.randn(3, 8).to(dtype), torch.rand(8).to(dtype)
    with autocast(dtype):
        found = WIDE[name](x, w)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, WIDE[name](x.float(), w.float()), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in WIDE if name not in ("batch_norm",)])
@pytest.mark.usefixtures("held")
def test_float64_stays_what_it_is(name):
    x, w = torch.randn(3, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    with autocast(torch.float16):
        assert WIDE[name](x, w).dtype == torch.float64


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.usefixtures("held")
def test_16_bits_and_float32_meet_in_a_norm(dtype):
    norm = nn.LayerNorm(8).to(dtype)
    with autocast(dtype):
        assert norm(torch.randn(3, 8)).dtype == torch.float32


@pytest.mark.usefixtures("held")
def test_running_statistics_are_moved_in_place():
    norm = nn.BatchNorm1d(8)
    norm.weight.data, norm.bias.data = norm.weight.data.half(), norm.bias.data.half()
    x = torch.randn(16, 8).half()
    with autocast(torch.float16):
        norm(x)
    reference = nn.BatchNorm1d(8)
    reference(x.float())
    torch.testing.assert_close(norm.running_var, reference.running_var, rtol=0, atol=0)


@pytest.mark.parametrize("operation", ["batch_norm", "instance_norm"])
@pytest.mark.usefixtures("held")
def test_running_statistics_of_16_bits_are_moved_too(operation):
    x = torch.linspace(-1, 3, 8 * 4 * 5).view(8, 4, 5).half()

    def moved(x, mean, variance, *, training):
        if operation == "batch_norm":
            F.batch_norm(x, mean, variance, None, None, training)
        else:
            F.instance_norm(x, mean, variance, None, None, training)
        return mean, variance

    expected = moved(x.float(), torch.zeros(4), torch.ones(4), training=True)
    with autocast(torch.float16):
        found = moved(x, torch.zeros(4).half(), torch.ones(4).half(), training=True)
        still = moved(x, torch.zeros(4).half(), torch.ones(4).half(), training=False)
    assert all(torch.equal(statistic, value.half()) for statistic, value in zip(found, expected, strict=True))
    assert not torch.equal(found[0], still[0])
    assert torch.equal(still[0], torch.zeros(4).half())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.usefixtures("held")
def test_checkpoints_recompute_in_the_same_types(use_reentrant):
    linear, norm = nn.Linear(8, 8).half(), nn.LayerNorm(8).half()

    def block(x):
        return norm(linear(x)).softmax(-1) ** 2

    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant)):
        x = torch.linspace(-1, 1, 24).view(3, 8).half().requires_grad_()
        with autocast(torch.float16):
            loss = run(x).sum()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.usefixtures("held")
def test_a_compiled_module_has_them_too():
    model = nn.Sequential(nn.Linear(8, 8).half(), nn.LayerNorm(8).half())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8).half()
    with autocast(torch.float16):
        found, expected = compiled(x), model(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_autocast_is_torchs_own_when_nobody_holds_them():
    WideOperations.hold()
    WideOperations.hold()
    x = torch.randn(3, 8).half()
    with autocast(torch.float16):
        WideOperations.release()
        assert x.softmax(-1).dtype == torch.float32
        WideOperations.release()
        assert x.softmax(-1).dtype == torch.float16
    assert x.softmax(-1).dtype == torch.float16


def test_every_operation_exists():
    for name in OPERATIONS:
        packet, _, overload = name.partition(".")
        assert hasattr(getattr(torch.ops.aten, packet), overload or "default"), name
