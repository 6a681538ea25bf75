from contextlib import suppress

import pytest
import torch
from torch import nn

from lightning_hybrid.parallel.zero.narrow import shown_as


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0 + 2**-12))
        self.precise = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.ones(2, 3).t())
        self.register_buffer("mean", torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrices_have_the_type_inside_and_their_own_memory_again_outside(dtype):
    module = Mixed()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    with suppress(RuntimeError), shown_as(module, dtype):
        assert module.linear.weight.dtype == module.linear.bias.dtype == dtype
        assert torch.equal(module.linear.weight, before["linear.weight"][1].to(dtype))
        assert module.precise.dtype == torch.float64
        assert {module.scale.dtype, module.turned.dtype, module.mean.dtype} == {torch.float32}
        raise RuntimeError("which must change nothing")
    for name, parameter in module.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_gradients_have_the_masters_type_after_a_pass_inside():
    module = Mixed()
    with shown_as(module, torch.bfloat16):
        module.linear(torch.ones(2, 3, dtype=torch.bfloat16)).sum()
    module.linear(torch.ones(2, 3)).sum().backward()
    assert module.linear.weight.grad.dtype == torch.float32
