"""A run that stops within an accumulation window goes on with its gradients, under the same layout or any other."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_hybrid.parallel.checkpoint.parts import all_pieces
from lightning_hybrid.precision import FP16MasterWeights
from lightning_hybrid.strategies.windows import ResumedWindow, kept_window
from tests.launch import run_trainers
from tests.small import WIDTH, Small, hybrid, samples, trainer_of, weights

ACCUMULATE, BATCH, BATCHES, LENGTH = 3, 8, 6, 4
STOP = 4  # the batch after which a checkpoint is saved: the second of the second window


class Mixing(nn.Module):
    """A block with a norm, whose gradient is a part on each rank of the tensor axis with sequence parallelism."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Windowed(Small):
    """Tied weights, a scalar, which stays whole, and a parameter that no batch uses."""

    block, depth, rate, weighted, loss_scale = Mixing, 4, 0.02, False, None

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.head.weight = self.inlet.weight
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))

    def forward(self, x):
        x = x.to(self.scale.dtype)
        place = torch.arange(1, LENGTH + 1, dtype=x.dtype).view(1, -1, 1) / LENGTH
        x = self.inlet(x[:, None, :] * place)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.head(x).mean(1)) * self.scale

    def training_step(self, batch, batch_idx):
        x, y = batch
        if not self.weighted:
            return F.mse_loss(self(x), y)
        weight = x[:, :1].abs() + 0.1
        return {"loss": ((self(x) - y).square() * weight).sum() / weight.sum(), "loss_weight": weight.sum()}

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": rest}], self.rate, eps=1e-3)


class Weighted(Windowed):
    weighted = True


@dataclass(frozen=True)
class Spread:
    """A layout, and how it keeps gradients."""

    pipeline: int = 1
    tensor: int = 1
    zero_stage: int = 0
    chunks: int = 1
    replicate: int = 1
    on_host: bool = False
    offload: bool = False

    def strategy(self, **more):
        tensor = {"tensor_parallel_size": self.tensor, "sequence_parallel": True} if self.tensor > 1 else {}
        return hybrid(
            self.pipeline,
            self.chunks,
            zero_stage=self.zero_stage,
            replicate_size=self.replicate,
            accumulate_on_cpu=self.on_host,
            cpu_offload=self.offload,
            **tensor,
            **more,
        )

    def loader(self, first):
        """Batches of this rank's replica, from one on; the number of all of them, as Lightning counts on from there."""
        replica = self.pipeline * self.tensor
        data = dist.get_world_size() // replica
        place = dist.get_rank() // self.tensor % data
        x, y = samples(BATCH * BATCHES).tensors
        order = [*range(first, BATCHES), *range(first)]
        batches = [tuple(t[BATCH * i : BATCH * (i + 1)][place::data] for t in (x, y)) for i in order]
        return DataLoader(batches, batch_size=None)


CORE = [
    (1, Spread()),
    (2, Spread(zero_stage=1)),
    (4, Spread(pipeline=2, chunks=2, zero_stage=1)),
    (2, Spread(zero_stage=2, on_host=True)),
    (4, Spread(tensor=2)),
    (2, Spread(pipeline=2)),
    (4, Spread(replicate=2, zero_stage=3)),
    (4, Spread(tensor=2, zero_stage=2)),
]
MORE = [
    (1, Spread(on_host=True)),
    *((2, Spread(zero_stage=stage)) for stage in (0, 2, 3)),
    *((4, Spread(pipeline=2, chunks=2, zero_stage=stage)) for stage in (0, 2, 3)),
    (1, Spread(zero_stage=3, offload=True)),
    (2, Spread(pipeline=2, zero_stage=2)),
    *((4, Spread(tensor=2, zero_stage=stage)) for stage in (1, 3)),
    (2, Spread(on_host=True)),
    *((4, Spread(replicate=2, zero_stage=stage)) for stage in (1, 2)),
    (2, Spread(zero_stage=3, offload=True)),
    (4, Spread(pipeline=2, tensor=2)),
    (2, Spread(zero_stage=1, on_host=True)),
    (4, Spread(pipeline=2, zero_stage=1, on_host=True)),
]


class Keep(Callback):
    """Saves a checkpoint, and the window beside it, as whole tensors."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assembly = trainer.strategy.assembly
        parts, numbers = kept_window(assembly.engine, assembly.runner.window)
        if (batch_idx + 1) % ACCUMULATE == 0:
            assert (parts, numbers) == ({}, {})
        if batch_idx == STOP:
            trainer.save_checkpoint(f"{self.path}.ckpt")
            tensors = gathered(parts)
            if dist.get_rank() == 0:
                torch.save({"tensors": tensors, "numbers": numbers}, f"{self.path}.window")


def gathered(parts):
    """Whole tensors of the parts of all ranks, every element of which some rank has."""
    mine = [(name, p.shape, p.dtype, piece.box, piece.data.clone()) for name, p, piece in all_pieces(parts)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole, covered = {}, {}
    for name, shape, dtype, box, data in (piece for pieces in everyone for piece in pieces):
        tensor = whole.setdefault(name, torch.full(shape, float("nan"), dtype=dtype))
        known = box.view(covered.setdefault(name, torch.zeros(shape, dtype=torch.bool)))
        assert not known.any() or torch.equal(box.view(tensor), data), f"{name} differs between ranks"
        box.view(tensor).copy_(data)
        known.fill_(True)
    assert all(known.all() for known in covered.values())
    return whole


class Memory:
    """Reads from a dictionary of whole tensors."""

    def __init__(self, tensors):
        self.tensors, self.names = tensors, list(tensors)

    def read(self, parts):
        for name, part, piece in all_pieces(parts):
            assert part.shape == self.tensors[name].shape
            piece.data.copy_(piece.box.view(self.tensors[name]))


class Seed(Callback):
    """Hands a saved window over, as loading a checkpoint does."""

    def __init__(self, path):
        saved = torch.load(f"{path}.window", weights_only=True)
        self.resumed = ResumedWindow(Memory(saved["tensors"]), saved["numbers"])

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.assembly.resumed = self.resumed


def run(model, spread, callbacks=(), path=None, **more):
    options = {"accumulate_grad_batches": ACCUMULATE, "use_distributed_sampler": False}
    if model.loss_scale is not None:
        options["plugins"] = [FP16MasterWeights(loss_scale=model.loss_scale)]
    trainer = trainer_of(spread.strategy(**more), callbacks=list(callbacks), **options)
    trainer.fit(model(), spread.loader(0 if path is None else STOP + 1), ckpt_path=path)
    assert trainer.global_step == 2
    return dict(weights(trainer))


def saving(model, numbered, folder):
    return [(run(model, spread), run(model, spread, [Keep(folder / str(number))])) for number, spread in numbered]


def resuming(model, pairs, folder):
    return [
        run(model, spread, [Seed(folder / str(source))], f"{folder / str(source)}.ckpt") for spread, source in pairs
    ]


def check(model, folder, layouts, tolerance=None):
    """Each layout saves, and finishes what it has saved itself and what the one before it has.

    Returns:
        What the saved gradients are addends of: for each layout, the names of their places.
    """
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-12}
    sizes, states = sorted({size for size, _ in layouts}), {}
    for size in sizes:
        numbered = [(number, spread) for number, (of, spread) in enumerate(layouts) if of == size]
        for (number, spread), (alone, saved) in zip(
            numbered, run_trainers(size, saving, model, numbered, folder, timeout=300)[0], strict=True
        ):
            states[number] = alone
            same(saved, alone, f"{spread} while it saves", rtol=0, atol=0)
    for number, (_, spread) in enumerate(layouts):
        same(states[number], states[0], str(spread), **tolerance)
    for size in sizes:
        own = [number for number, (of, _) in enumerate(layouts) if of == size]
        pairs = [(number, source) for number in own for source in (number, (number - 1) % len(layouts))]
        todo = [(layouts[number][1], source) for number, source in pairs]
        for (number, source), state in zip(
            pairs, run_trainers(size, resuming, model, todo, folder, timeout=300)[0], strict=True
        ):
            exact = {"rtol": 0, "atol": 0} if number == source else tolerance
            same(state, states[number], f"{layouts[number][1]} from {layouts[source][1]}", **exact)
    return [places(folder / f"{number}.window") for number in range(len(layouts))]


def same(state, expected, about, **tolerance):
    assert_close(state, expected, **tolerance, msg=lambda message: f"{about}: {message}")


def places(path):
    return {name.split(".")[1] for name in torch.load(path, weights_only=True)["tensors"]}


RESUMING = "ignore:You're resuming from a checkpoint that ended before the epoch"


@pytest.mark.filterwarnings(RESUMING)
@pytest.mark.full  # tests/test_checkpoints.py and the next ones have windows too
def test_a_window_goes_on_under_any_layout(tmp_path):
    whole, shards, pipeline, host, tensor, holders, copies, both = check(Weighted, tmp_path, CORE)
    assert whole == {"data0"}
    assert shards == {"data0", "data1"}
    assert pipeline == {f"data{data}{holder}" for data in (0, 1) for holder in ("", "-pipeline0", "-pipeline1")}
    assert host == {"all"}
    assert tensor == {f"data{data}{part}" for data in (0, 1) for part in ("", "-tensor0", "-tensor1")}
    assert holders == {"data0", "data0-pipeline0", "data0-pipeline1"}
    assert copies == {"copy0", "copy1", "data0", "data1", "data2", "data3"}, "the scalar stays whole"
    assert both == {"all", "all-tensor0", "all-tensor1", "data0", "data1"}


@pytest.mark.full
@pytest.mark.filterwarnings(RESUMING)
def test_a_window_goes_on_under_many_more_layouts(tmp_path):
    check(Windowed, tmp_path, CORE + MORE)


class Saved(Callback):
    """Saves a checkpoint within the window."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == STOP:
            trainer.save_checkpoint(self.path)


class Looked(Saved):
    """Looks at what is saved, so that it is gathered in memory."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.sums = [value.sum().item() for value in checkpoint["state_dict"].values()]


def saved_and_resumed(folder, kind):
    """Weights of a run of four processes that has saved within a window, and of others that have gone on from it."""
    spreads = [Spread(pipeline=2, zero_stage=1), Spread(replicate=2, zero_stage=3), Spread(tensor=2)]
    path = folder / "window.ckpt"
    saving = Saved if kind == "sharded" else Looked  # tests/test_checkpoints.py has files that nobody looks at
    alone, whole = (run(Weighted, spreads[0], saved, state_dict_type=kind) for saved in ([], [saving(path)]))
    return [alone, whole, *(run(Weighted, spread, path=path, state_dict_type=kind) for spread in spreads)]


@pytest.mark.filterwarnings(RESUMING)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_keeps_its_window(tmp_path, kind):
    whole, saved, again, *others = run_trainers(4, saved_and_resumed, tmp_path, kind, timeout=200)[0]
    same(saved, whole, "while it saves", rtol=0, atol=0)
    same(again, whole, "the same layout", rtol=0, atol=0)
    for state in others:
        same(state, whole, "another layout", rtol=1e-9, atol=1e-12)


class Changing(Windowed):
    """What is outside the last two blocks is trained by the first batch of the second window, and not by the others."""

    def __init__(self):
        super().__init__()
        self.set(False)

    def set(self, trained):
        for name, parameter in self.named_parameters():
            if not name.startswith(("blocks.2", "blocks.3")):
                parameter.requires_grad_(trained)

    def on_train_batch_start(self, batch, batch_idx):
        self.set(batch_idx == ACCUMULATE)


@pytest.mark.filterwarnings(RESUMING)
def test_what_was_frozen_within_the_window_keeps_its_gradient(tmp_path):
    layouts = [(1, Spread()), *((2, Spread(zero_stage=stage)) for stage in (1, 3))]
    check(Changing, tmp_path, layouts)
    for number in range(len(layouts)):
        names = torch.load(tmp_path / f"{number}.window", weights_only=True)["tensors"]
        assert any(name.endswith(".blocks.0.up.weight") for name in names)


class Choosy(Windowed):
    """Batches of one replica use a parameter that those of the other do not."""

    def forward(self, x):
        first = dist.get_rank() == 0
        return super().forward(x) + (self.unused.sum() if first else 0) * x.mean()


@pytest.mark.filterwarnings(RESUMING)
def test_a_gradient_of_one_replica_goes_on(tmp_path):
    kept = [(0, False), (1, False), (2, False), (3, False), (1, True)]
    layouts = [(2, Spread(zero_stage=stage, on_host=on_host)) for stage, on_host in kept]
    check(Choosy, tmp_path, layouts)


class Halves(Weighted):
    """float16 over float32 masters: gradients wait in float32, scaled."""

    loss_scale = 128.0

    def __init__(self):
        super().__init__()
        self.float()


@pytest.mark.filterwarnings(RESUMING)
def test_gradients_of_masters_go_on(tmp_path):
    """Sums in another order change a master's last bit, which may turn a float16 copy's: 1e-3 of what it gives."""
    layouts = [(2, Spread(zero_stage=1)), (2, Spread(zero_stage=2)), (2, Spread(zero_stage=3, on_host=True))]
    found = check(Halves, tmp_path, layouts, {"rtol": 1e-3, "atol": 1e-4})
    assert found == [{"data0", "data1"}, {"all", "data0", "data1"}, {"all"}]


class Doubled(Halves):
    loss_scale = 256.0


class Stopping(Weighted):
    """Fails between the first two batches of the second window."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == ACCUMULATE + 1:
            raise ArithmeticError


def edges(folder):
    """What one process says and does with a window that is whole, wrong, or not there."""
    path, spread = folder / "window", Spread()
    alone = run(Weighted, spread, [Keep(path)])
    saved, seed = torch.load(f"{path}.window", weights_only=True), Seed(path)
    assert saved["numbers"]["num_batches"] == STOP + 1 - ACCUMULATE

    seed.resumed = ResumedWindow(Memory(saved["tensors"]), {**saved["numbers"], "num_batches": 1})
    with pytest.raises(ValueError, match=r"gradients of 1 batch\(es\) of an accumulation window that goes on after 2"):
        run(Weighted, spread, [seed], f"{path}.ckpt")

    strange = {f"{name}_of_old": tensor for name, tensor in saved["tensors"].items()}
    seed.resumed = ResumedWindow(Memory(strange), saved["numbers"])
    with pytest.raises(ValueError, match=r"gradients of \['scale_of_old', .* which Weighted has not"):
        run(Weighted, spread, [seed], f"{path}.ckpt")

    seed.resumed = ResumedWindow(Memory({}), {})
    with pytest.warns(UserWarning, match=r"no gradients of the first 2 batch\(es\)"):
        without = run(Weighted, spread, [seed], f"{path}.ckpt")
    assert not torch.allclose(without["inlet.weight"], alone["inlet.weight"], rtol=1e-3, atol=1e-4)

    trainer = trainer_of(spread.strategy(), accumulate_grad_batches=ACCUMULATE)
    module = Stopping()
    with pytest.raises(ArithmeticError):
        trainer.fit(module, spread.loader(0))
    trainer.fit(module, spread.loader(STOP + 1), ckpt_path=f"{path}.ckpt")
    same(dict(weights(trainer)), alone, "after a fit that failed within a window", rtol=0, atol=0)

    alone = run(Halves, spread, [Keep(path)])
    same(run(Doubled, spread, [Seed(path)], f"{path}.ckpt"), alone, "with another loss scale", rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings(RESUMING)
def test_a_window_that_cannot_go_on_is_refused_or_warned_of(tmp_path):
    run_trainers(1, edges, tmp_path)
