"""What torch's Python interface does not see, on sequence shards: numbers of one process, saved buffers too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, weights


class Block(nn.Module):
    """An MLP with a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale + x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale + gradient.mean(1, keepdim=True), (gradient * x).sum((0, 1))


class WithFunction(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return super().forward(Scale.apply(x, self.scale))


class Mapped(Block):
    def forward(self, x):
        return super().forward(x) + torch.vmap(lambda row: row.mean(0, keepdim=True))(x)


class Hooked(Block):
    """Scales gradients by the norm of the whole, as gradient clipping inside a network does."""

    def __init__(self):
        super().__init__()
        self.norm.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / (1 + inputs[0].norm()),))


class Recomputed(Block):
    def forward(self, x):
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(self.norm(y)))), x, use_reentrant=True)


class Keeping(Block):
    """Keeps activations in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("inner", torch.zeros(()))

    def forward(self, x):
        self.seen, self.inner = x.detach(), self.up(x).detach()
        return super().forward(x)


class Sequences(Small):
    depth = 2

    def __init__(self, block, *, recomputes=False):
        self.block, self.recomputes = block, recomputes
        super().__init__()

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.recomputes else block(x)
        return self.outlet(x)

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[0].sum(-1, keepdim=True).sin())


BLOCKS = {
    "function": (WithFunction, {}),
    "vmap": (Mapped, {}),
    "hook": (Hooked, {}),
    "checkpoint in a block": (Recomputed, {}),
    "checkpoint of blocks": (Block, {"recomputes": True}),
    "buffers": (Keeping, {}),
}


def trained(name, strategy):
    block, options = BLOCKS[name]
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(6, 5, WIDTH, generator=generator, dtype=torch.float64))
    trainer = fit(Sequences(block, **options), DataLoader(data, 2), strategy, gradient_clip_val=0.05)
    return weights(trainer)


def trained_split(sequence_parallel):
    options = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    return {name: trained(name, hybrid(1, 1, 1, **options)) for name in BLOCKS}


@pytest.mark.filterwarnings("ignore:.*has no rule for parts")
@pytest.mark.parametrize("sequence_parallel", [False, True, "regather"])
def test_functions_that_torch_does_not_show_give_the_numbers_of_one_process(sequence_parallel):
    found = run_trainers(2, trained_split, sequence_parallel)[0]
    for name in BLOCKS:
        expected = dict(trained(name, "auto"))
        assert all(type(value) is torch.Tensor for value in found[name].values())
        torch.testing.assert_close(
            found[name], expected, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


class Penalty(Sequences):
    """Goes over its parameters in the step."""

    def training_step(self, batch, batch_idx):
        decay = sum(p.pow(2).sum() for p in self.parameters() if p.ndim > 1)
        names = sum(p.abs().sum() for name, p in self.named_parameters() if name.endswith("bias"))
        assert sum(p.numel() for p in self.blocks.parameters()) == 2 * (2 * WIDTH + WIDTH * 8 + 8 + 8 * WIDTH + WIDTH)
        return (
            self.loss(batch) + 0.01 * decay + 0.02 * names + 0.01 * sum(p.norm() for p in self.blocks[0].parameters())
        )


class ByHand(Sequences):
    """Clips by hand."""

    def __init__(self, block):
        super().__init__(block)
        self.automatic_optimization, self.norms = False, []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))
        assert all(p.grad.shape == p.shape for p in self.parameters())
        optimizer.step()


def trained_over_parameters(kind, strategy):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(6, 5, WIDTH, generator=generator, dtype=torch.float64))
    module = kind(Block)
    return weights(fit(module, DataLoader(data, 2), strategy)), getattr(module, "norms", [])


def over_parameters(sequence_parallel):
    options = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    return [trained_over_parameters(kind, hybrid(1, 1, 1, **options)) for kind in (Penalty, ByHand)]


@pytest.mark.filterwarnings("ignore:.*has no rule for parts")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_going_over_parameters_in_a_step_meets_wholes(sequence_parallel):
    for rank in run_trainers(2, over_parameters, sequence_parallel):
        for kind, (found, norms) in zip((Penalty, ByHand), rank, strict=True):
            expected, expected_norms = trained_over_parameters(kind, "auto")
            torch.testing.assert_close(norms, expected_norms, rtol=1e-9, atol=1e-12)
            if found:
                torch.testing.assert_close(found, dict(expected), rtol=1e-9, atol=1e-12)
