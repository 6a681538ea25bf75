import gc
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.parallel.ledgers.memory import Memory, MemoryMeter, optimizer_bytes, parameter_bytes


@contextmanager
def measured(root, optimizers=()):
    meter, memory = MemoryMeter(root), Memory()
    meter.start()
    with meter:
        yield memory
    vars(memory).update(vars(meter.finish(optimizers)))
    meter.close()


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_saved_activations_are_those_of_a_calculation_by_hand():
    net, x, y = mlp(), torch.ones(7, 6, dtype=torch.float64), torch.ones(7, 2, dtype=torch.float64)
    with measured(net) as memory:
        nn.functional.mse_loss(net(x), y).backward()
    # the input; what tanh gave, which the second layer saves too; the loss's prediction and target
    assert memory.activations == {"0": 7 * 6 * 8, "1": 7 * 5 * 8, "": 2 * 7 * 2 * 8}
    assert memory.gradients == memory.trainable == {"0": (6 * 5 + 5) * 8, "2": (5 * 2 + 2) * 8}
    assert memory.frozen == memory.states == {}


def test_frozen_layers_keep_nothing_for_the_backward_pass():
    net = mlp()
    net[0].requires_grad_(False)
    with measured(net) as memory:
        net(torch.ones(7, 6, dtype=torch.float64)).sum().backward()
    assert memory.activations == {"2": 7 * 5 * 8}  # the second layer's input; no gradient goes through tanh
    assert memory.trainable == memory.gradients == {"2": 96}
    assert memory.frozen == {"0": 280}


def test_the_peak_is_that_of_one_graph_where_graphs_follow_each_other():
    net, x = mlp(), torch.ones(7, 6, dtype=torch.float64)
    with measured(net) as one:
        net(x).sum().backward()
    with measured(net) as two:
        for _ in range(2):
            net(x).sum().backward()
    with measured(net) as both:
        first, second = net(x).sum(), net(x).sum()
        (first + second).backward()
    assert sum(two.activations.values()) == sum(one.activations.values())
    assert sum(both.activations.values()) == sum(one.activations.values()) + 7 * 5 * 8  # the input is shared


def tower():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])


def test_a_checkpoint_keeps_its_inputs_and_one_recomputed_block():
    net, x = tower(), torch.ones(5, 4, requires_grad=True)
    with measured(net) as memory:
        y = x
        for block in net:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()
    size = 5 * 4 * 4
    # three inputs, and of the last block what its layers save: the input, which is there, and two results of tanh
    assert sum(memory.activations.values()) == 3 * size + 2 * size
    assert memory.activations["2.1"] == size


def halves():
    return saved_tensors_hooks(lambda t: (t.dtype, t.half()), lambda packed: packed[1].to(packed[0]))


def test_what_counts_is_what_hooks_of_others_keep():
    net, x = mlp(), torch.ones(7, 6, dtype=torch.float64)
    with measured(net) as memory, halves():
        net(x).sum().backward()
    weights = 5 * 2 * 2  # such hooks keep a copy of the second layer's weight too
    assert sum(memory.activations.values()) == (7 * 6 + 7 * 5 + 7 * 5) * 2 + weights
    nested = MemoryMeter(net)
    nested.start()
    with measured(net) as outer, nested, halves():
        net(x).sum().backward()
    assert nested.finish([]).activations == outer.activations == memory.activations


def test_results_are_the_same_to_the_bit_and_nothing_stays_behind():
    net, x = tower(), torch.randn(5, 4)
    enter = saved_tensors_hooks.__enter__

    def gradients():
        net.zero_grad()
        checkpoint(net, x, use_reentrant=False).square().mean().backward()
        return [p.grad.clone() for p in net.parameters()]

    before = gradients()
    with measured(net):
        assert saved_tensors_hooks.__enter__ is not enter
        during = gradients()
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
    assert saved_tensors_hooks.__enter__ is enter
    packed = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        net(x).sum().backward()
    assert all(isinstance(t, torch.Tensor) for t in packed)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_a_write_to_a_saved_tensor_is_still_found():
    net = nn.Linear(2, 2)
    with measured(net):
        y = net(torch.ones(3, 2)).tanh()
        loss = y.sum()
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match=r"\[3, 2\] that the backward pass needs has been modified .* 1 time"):
            loss.backward()


def test_second_derivatives_and_kept_graphs_work():
    net, x = mlp(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def penalty():
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x, retain_graph=True)[0]

    with measured(net) as memory:
        inside = penalty()
    assert torch.equal(inside, penalty())
    assert sum(memory.activations.values()) > 0


def test_gradients_peak_where_they_are_and_freed_ones_do_not_count():
    net = mlp()
    with measured(net) as memory:
        net(torch.ones(7, 6, dtype=torch.float64)).sum().backward()
        net.zero_grad(set_to_none=True)
        gc.collect()
        net[2](torch.ones(7, 5, dtype=torch.float64)).sum().backward()
    assert memory.gradients == {"0": 280, "2": 96}


def test_shared_parameters_and_buffers_count_once():
    net = mlp()
    net.add_module("again", net[0])
    net.add_module("tied", nn.Linear(6, 5).double())
    net.tied.weight = net[0].weight
    flat = torch.zeros(10)
    net.first, net.second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    trainable, frozen = parameter_bytes(net)
    assert trainable == {"": 40, "0": 280, "2": 96, "tied": 40}
    assert frozen == {}


def test_states_stand_under_the_module_of_their_parameter():
    net, other = mlp(), nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.AdamW(net.parameters()), torch.optim.SGD([other], 0.1, momentum=0.9)]
    net(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    other.grad = torch.ones(3)
    for optimizer in optimizers:
        optimizer.step()
    assert optimizer_bytes(net, optimizers) == {"0": 2 * 280 + 2 * 4, "2": 2 * 96 + 2 * 4, "": 12}


def test_of_each_category_the_largest_breakdown_is_kept():
    a, b = Memory(trainable={"x": 3}, gradients={"x": 1}), Memory(trainable={"x": 2}, gradients={"y": 2})
    assert a.largest(b) == b.largest(a) == Memory(trainable={"x": 3}, gradients={"y": 2})
    assert a.totals() == {**dict.fromkeys(vars(a), 0), "trainable": 3, "gradients": 1}


class Squashed(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


def test_compiled_blocks_stay_compiled_and_are_measured():
    net, x = nn.Sequential(Squashed(6, 5), nn.Linear(5, 2)).double(), torch.randn(7, 6, dtype=torch.float64)
    net(x).sum().backward()
    before = [p.grad.clone() for p in net.parameters()]
    graphs = []
    net.zero_grad()
    net[0].compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    with measured(net) as memory:
        net(x).sum().backward()
    assert len(graphs) == 1
    assert all(torch.equal(a, p.grad) for a, p in zip(before, net.parameters(), strict=True))
    assert sum(memory.activations.values()) == 7 * 6 * 8 + 7 * 5 * 8
