import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.parallel.data_parallel import Replicated, broadcast_whole
from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.zero.sharding import Sharded
from lightning_hybrid.parallel.zero.units import choose_units
from tests.launch import run_ranks

CPU = torch.device("cpu")
WINDOW = [[(0, 0), (0, 1)], [(0, 0)]]  # backward passes of the batches of an accumulation window


class Model(nn.Module):
    """Odd sizes, a parameter without a gradient, and one that two blocks share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.inlet = nn.Linear(2, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.unused = nn.Linear(1, 1)
        self.double()

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().sum()


def inputs(rank, batch, micro_batch):
    generator = torch.Generator().manual_seed(100 * rank + 10 * batch + micro_batch)
    return torch.randn(2, 2, generator=generator, dtype=torch.float64)


def window_on(data, root, rank, batches=WINDOW):
    for batch, order in enumerate(batches):
        data.begin(order, reduce=batch == len(batches) - 1)
        results = [data.step(lambda b=batch, i=i: Result([], root(inputs(rank, b, i)))) for _, i in order]
        for (stage, i), result in zip(order, results, strict=True):
            data.before_backward(stage, i)
            result.output.backward()
    data.finish()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(kind):
    mesh = Mesh(Layout(1, 2), device=CPU)
    root = Model()
    data = Replicated(None, root, mesh)
    if kind != "replicated":
        cut = StageCut(root, [f"blocks.{i}" for i in range(3)], [3], pipeline=1, rank=0, device=CPU)
        cut = cut if kind == "cut" else None
        data = Sharded(root, mesh, choose_units(root, cut, [f"blocks.{i}" for i in range(3)], zero_stage=1))
    optimizer = torch.optim.SGD(root.parameters(), 0.1, momentum=0.9)
    gradients, losses = [], []
    for _ in range(2):
        window_on(data, root, mesh.data_rank)
        gradients.append({name: None if p.grad is None else full(p.grad) for name, p in root.named_parameters()})
        kept = {name: local(p).numel() for name, p in root.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        data.gather()
        with torch.no_grad():
            losses.append(
                root(inputs(9, 0, 0)).item()
                if kind == "replicated"
                else data.step(lambda: Result([], root(inputs(9, 0, 0)))).output.item()
            )
    state = sum(local(value["momentum_buffer"]).numel() for value in optimizer.state.values())
    return gradients, losses, kept, state


def reference():
    root = Model()
    optimizer = torch.optim.SGD(root.parameters(), 0.1, momentum=0.9)
    gradients, losses = [], []
    for _ in range(2):
        for rank in range(2):
            for batch, order in enumerate(WINDOW):
                for _, i in order:
                    root(inputs(rank, batch, i)).backward()
        gradients.append({name: p.grad for name, p in root.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(root(inputs(9, 0, 0)).item())
    return gradients, losses


@pytest.mark.parametrize("kind", ["replicated", "cut", "whole"])
def test_gradients_of_a_window_are_summed_over_micro_batches_batches_and_replicas(kind):
    expected, losses = reference()
    results = run_ranks(2, trained, kind)
    for gradients, found, *_ in results:
        torch.testing.assert_close(found, losses)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, gradient in theirs.items():
                if gradient is None:
                    assert ours[name] is None or not ours[name].any(), name
                else:
                    torch.testing.assert_close(ours[name], gradient, msg=name)
    whole = sum(p.numel() for name, p in Model().named_parameters() if not name.startswith("unused"))
    states = [state for *_, state in results]
    if kind == "replicated":
        assert states == [whole, whole]
    else:
        assert all(state < 0.7 * whole for state in states)
        assert whole <= sum(states) <= whole + 2


def kept_whole():
    """Between begin and the last backward of a window parameters stay gathered, and are let go of behind it."""
    mesh = Mesh(Layout(1, 2), device=CPU)
    root = Model()
    data = Sharded(root, mesh)
    sizes = [isinstance(root.inlet.weight, DTensor)]
    window_on(data, root, mesh.data_rank, [[(0, 0)]])
    sizes.append(isinstance(root.inlet.weight, DTensor))
    data.begin([(0, 0), (0, 1)], reduce=False)
    for i in range(2):
        result = data.step(lambda i=i: Result([torch.ones(1)], root(inputs(0, 0, i))))
        assert [tensor.tolist() for tensor in result.payload] == [[1]]
        sizes.append(isinstance(root.inlet.weight, DTensor))
        data.before_backward(0, i)
        result.output.backward()
        sizes.append(isinstance(root.inlet.weight, DTensor))
    data.begin([(0, 1)], reduce=True)
    with pytest.raises(AssertionError, match="in the order that begin"):
        data.before_backward(0, 0)
    return sizes


def test_sharded_parameters_are_whole_from_the_first_forward_to_the_last_backward():
    assert run_ranks(2, kept_whole) == [[True, True, False, False, False, False]] * 2


def values_of_the_first():
    """Buffers whose memory is not their elements in order, of other values on the second rank."""
    root, factor = nn.Module(), 1 + dist.get_rank()
    numbers = torch.arange(6.0) * factor
    root.register_buffer("transposed", numbers.view(2, 3).t())
    root.register_buffer("conjugate", torch.complex(numbers, numbers).conj())
    root.register_buffer("negative", torch.complex(numbers, numbers).conj().imag)
    root.register_buffer("empty", torch.empty(0, 3))
    broadcast_whole(root, CPU)
    return {name: buffer.clone().resolve_conj().resolve_neg() for name, buffer in root.named_buffers()}


def test_all_ranks_begin_with_the_values_of_the_first_whatever_lies_in_memory():
    first, second = run_ranks(2, values_of_the_first)
    numbers = torch.arange(6.0)
    assert torch.equal(first["transposed"], numbers.view(2, 3).t())
    assert torch.equal(first["conjugate"], torch.complex(numbers, -numbers))
    assert torch.equal(first["negative"], -numbers)
    assert all(torch.equal(first[name], second[name]) for name in first)
