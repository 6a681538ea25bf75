"""Saved-tensor hooks that pass on what they do not want."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from lightning_hybrid.parallel.memory.hooks import ChainedHooks, keep


def test_inner_hooks_leave_to_outer_ones_what_they_do_not_take():
    torch.manual_seed(0)
    x, weight = torch.rand(2, 3, requires_grad=True), torch.rand(3, 4, requires_grad=True)
    (x @ weight).exp().sum().backward()
    expected, taken = [x.grad, weight.grad], {"outer": [], "inner": []}
    x.grad = weight.grad = None

    def take(name, number):
        def pack(tensor):
            if tensor.shape[0] != number:
                return None
            taken[name].append(list(tensor.shape))
            return keep(tensor)

        return pack

    with ChainedHooks(take("outer", 2)), ChainedHooks(take("inner", 3)):
        result = (x @ weight).exp().sum()
    assert taken == {"outer": [[2, 3], [2, 4]], "inner": [[3, 4]]}
    result.backward()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_hooks_of_others_get_what_is_left():
    x = torch.rand(3, requires_grad=True)
    with save_on_cpu(), ChainedHooks(lambda tensor: None):
        x.exp().sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_writing_to_what_is_kept_is_the_error_that_autograd_makes():
    x = torch.rand(3, requires_grad=True)
    with ChainedHooks(lambda tensor: None):
        y = x.exp()
        y.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \[3\] .* modified in place, 1 time"):
        y.sum().backward()
