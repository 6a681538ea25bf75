import pytest, torch
from torch import nn
from tests.launch import run_trainers
from tests.small import *
from tests.test_refusals import *

GLOBAL = []
class Ctx:
    def __init__(self): self.losses = []

class GBlock(Block):
    def forward(self, x):
        GLOBAL.append(x.square().mean())
        return super().forward(x)

class GlobalList(Small):
    block = GBlock
    def loss(self, batch):
        GLOBAL.clear()
        return super().loss(batch) + sum(GLOBAL)

class CtxBlock(Block):
    def forward(self, x):
        self.ctx.losses.append(x.square().mean())
        return super().forward(x)

class SharedObject(Small):
    block = CtxBlock
    def __init__(self):
        super().__init__()
        self.ctx = Ctx()
        for b in self.blocks: b.ctx = self.ctx
    def loss(self, batch):
        self.ctx.losses.clear()
        return super().loss(batch) + sum(self.ctx.losses)

class HookClosure(Small):
    def __init__(self):
        super().__init__()
        feats = []
        for b in self.blocks: b.register_forward_hook(lambda m, i, o: feats.append(o.square().mean()))
        self.get = lambda: feats
    def loss(self, batch):
        self.get().clear()
        return super().loss(batch) + sum(self.get())

class BufBlock(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("usage", torch.zeros(()))
    def forward(self, x):
        self.usage.copy_(x.detach().square().mean())
        return super().forward(x)

class BufferRead(Small):
    block = BufBlock
    def loss(self, batch):
        return super().loss(batch) * (1 + sum(b.usage for b in self.blocks))

class ItemOfInlet(Small):
    def forward(self, x):
        x = self.inlet(x)
        scale = x.abs().mean().item()
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * scale

class TolistOfInlet(Small):
    def forward(self, x):
        x = self.inlet(x)
        scale = max(x.flatten().tolist())
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * scale

class TruthOfInlet(Small):
    def forward(self, x):
        x = self.inlet(x)
        sign = 1 if x.sum() > 0 else -1
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * sign

class MaskOfInlet(Small):
    def forward(self, x):
        x = self.inlet(x)
        n = len(x[x[:, 0] > 0])
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * n

class ItemOfParameter(Small):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    def forward(self, x):
        x = self.inlet(x) * self.temperature
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * self.temperature.item()

class ItemOfParameterOnly(Small):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * self.temperature.item()

class NestedAux(Block):
    def __init__(self):
        super().__init__()
        self.inner = BlockWithAux()
    def forward(self, x): return self.inner(x)

class NestedAuxRead(Small):
    block = NestedAux
    def loss(self, batch):
        return super().loss(batch) + sum(b.inner.aux for b in self.blocks)

class SkipFromInlet(Small):
    def forward(self, x):
        x = kept = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x + kept)

class DelBlock(Block):
    def forward(self, x):
        if hasattr(self, "cache"):
            del self.cache
        self.cache = x.detach()
        return super().forward(x)

class Del(Small):
    block = DelBlock

class LaterSkip(Small):
    def forward(self, x):
        x = kept = self.blocks[0](self.inlet(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.outlet(x + (kept if self.trainer.global_step >= 1 else 0))

class TorchEqual(Reading):
    def read(self, x):
        return x + torch.equal(x, x)
class NpAsarray(Reading):
    def read(self, x):
        import numpy
        return x + float(numpy.asarray(x.detach()).max())
class Unique(Reading):
    def read(self, x):
        return x + len(torch.unique(x))
class FloatX(Reading):
    def read(self, x):
        return x + float(x.max())
class Where1(Reading):
    def read(self, x):
        return x + len(torch.where(x > 0)[0])
class Max2(Reading):
    def read(self, x):
        return x * max(x.view(-1)).detach()
class Format(Reading):
    def read(self, x):
        return x + len(f"{x.mean():.3f}")
class Repr(Reading):
    def read(self, x):
        return x + len(repr(x))
class RepeatInterleave(Reading):
    def read(self, x):
        return torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, dim=0)[:4]
class Allclose(Reading):
    def read(self, x):
        return x + torch.allclose(x, x)
class Storage(Reading):
    def read(self, x):
        return x + x.detach().untyped_storage()[0]

def outcome(model, partition):
    module = model()
    try:
        return weights(fit(module, loader(8, 4), hybrid(partition=partition, microbatches=1)))
    except Exception as e:
        return f"{type(e).__name__}: {e}"

@pytest.mark.parametrize("model", [GlobalList, SharedObject, HookClosure, BufferRead, ItemOfInlet, TolistOfInlet, TruthOfInlet, MaskOfInlet, ItemOfParameter, ItemOfParameterOnly, NestedAuxRead, SkipFromInlet, Del, LaterSkip, TorchEqual, NpAsarray, Unique, FloatX, Where1, Max2, Format, Repr, RepeatInterleave, Allclose, Storage], ids=lambda m: m.__name__)
def test_a(model):
    a, b = run_trainers(2, outcome, model, [2,4], timeout=30)
    if isinstance(a, str):
        print(a); print(b)
        assert "RuntimeError" in a or "AbsentV" in a
        return
    ref = weights(fit(model(), loader(8, 4)))
    torch.testing.assert_close(a, dict(ref))
    print("TRAINS EXACTLY")
