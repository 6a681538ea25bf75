"""Layers around calls of modules."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_hybrid.parallel.memory.calls import Order, surround


def noting(log, name):
    def layer(proceed, args, kwargs):
        log.append(name)
        return proceed(*args, **kwargs)

    return layer


class Own(nn.Module):
    """Torch compiles its own modules as a part of others alone."""

    def forward(self, x):
        return x + 1


def test_layers_lie_in_their_order_whatever_came_first_and_hooks_outside():
    module, log = nn.Linear(3, 3), []
    module.register_forward_pre_hook(lambda *_: log.append("hook"))
    expected = module(torch.ones(3))
    log.clear()
    away = [surround(module, order, noting(log, order.name)) for order in (Order.STREAM, Order.RECOMPUTE)]
    assert torch.equal(module(torch.ones(3)), expected)
    assert log == ["hook", "RECOMPUTE", "STREAM"]
    away[0]()
    module(torch.ones(3))
    assert log[3:] == ["hook", "RECOMPUTE"]
    away[1]()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_plain_and_their_own(make):
    module, log = nn.Linear(3, 3), []
    surround(module, Order.RECOMPUTE, noting(log, "layer"))
    other = make(module)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    assert torch.equal(other(torch.ones(3)), torch.zeros(3))
    assert not log


def test_a_compiled_module_is_surrounded_as_one_piece_and_one_that_has_its_own_forward_keeps_it():
    module, log, graphs = Own(), [], []
    module.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    away = surround(module, Order.RECOMPUTE, noting(log, "layer"))
    module(torch.ones(3))
    assert log == ["layer"]
    assert len(graphs) == 1
    assert "forward" not in vars(module)
    away()
    module(torch.ones(3))
    assert log == ["layer"]
    own = nn.Linear(3, 3)
    own.forward = lambda x: x + 1
    surround(own, Order.RECOMPUTE, noting(log, "own"))()
    assert torch.equal(own(torch.ones(3)), torch.full((3,), 2.0))


def test_compiled_code_around_modules_runs_their_layers_each_time():
    log, graphs = [], []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for number, module in enumerate(net):
        surround(module, Order.RECOMPUTE, noting(log, number))
    run = torch.compile(lambda x: net(x + 1) * 2, backend=backend)
    with torch.no_grad():
        run(torch.ones(3))
        run(torch.ones(3))
    assert log == [0, 1] * 2
    assert [target.__name__ for graph in graphs for target in graph] == ["add", "mul"]


def test_a_place_is_taken_once():
    module = nn.Linear(3, 3)
    surround(module, Order.STREAM, noting([], ""))
    with pytest.raises(RuntimeError, match="Calls of Linear have a layer of kind stream already"):
        surround(module, Order.STREAM, noting([], ""))
