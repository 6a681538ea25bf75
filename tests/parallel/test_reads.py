import torch
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.parallel.zero.reads import ReadWatch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))


NAMES = ["embed", "head", *(f"blocks.{i}" for i in range(4))]


def found(step):
    model = Model()
    watch = ReadWatch(model, NAMES)
    with watch:
        step(model, torch.arange(3))
    step(model, torch.arange(3))  # behind it nothing is noted
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return watch.found


def called(model, x):
    x = model.embed(x).to(model.head.weight.dtype)
    assert model.blocks[0][0].weight.shape == (4, 4)
    assert model.blocks[0][0].weight.dim() == 2
    assert model.blocks[0][0].weight.untyped_storage().nbytes() == 4 * 16
    for block in model.blocks:
        x = block(x)
    return model.head(x)


def test_modules_that_are_called_may_be_asked_for_shapes_and_types():
    assert found(called) == set()


def test_reads_past_a_call_are_found_in_every_disguise():
    assert found(lambda m, x: F.linear(called(m, x) @ m.head.weight, m.embed.weight)) == {"head", "embed"}
    assert found(lambda m, x: called(m, x) @ m.embed.weight.data) == {"embed"}
    assert found(lambda m, x: m.blocks[1][0](m.embed(x))) == {"blocks.1"}
    assert found(lambda m, x: m.blocks[2].forward(m.embed(x))) == {"blocks.2"}
    assert found(lambda m, x: sum(p.square().sum() for p in m.blocks.parameters())) == set(NAMES[2:])
    assert found(lambda m, x: called(m, x) + torch.stack([b[0].bias for b in m.blocks]).sum()) == set(NAMES[2:])
