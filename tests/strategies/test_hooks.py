from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.strategies.hooks import SharedHooks
from tests.launch import run_ranks

CPU = torch.device("cpu")


class Module(LightningModule):
    """Notes what would really be logged."""

    def __init__(self):
        super().__init__()
        self.logged = deque()

    def log(self, name, value, **options):
        self.logged.append((name, float(value), options["reduce_fx"], options["batch_size"]))


class Recording(Module):
    """Keeps what its steps saw in every way that users keep it."""

    def __init__(self):
        super().__init__()
        self.outputs, self.by_name, self.total = [torch.tensor(-1.0)], {"loss": [], "n": 0}, torch.zeros(2)
        self.best, self.name, self.same, self.seen, self.recent = None, "start", [1], set(), deque(maxlen=2)
        self.counts, self._private = Counter(), 0

    def step(self, value):
        """What a step does on the last stage with true values, and on others with whatever is there."""
        self.outputs.append(torch.tensor(value, requires_grad=True) * 1)
        self.by_name["loss"].append(value)
        self.by_name["n"] += 1
        self.total += value
        self.best, self.name, self._private = value, f"after {value}", value
        self.seen.add(value)
        self.recent.extend([value, value + 1, value + 2])
        self.counts[value] += 2

    def state(self):
        return {
            "outputs": [(x.item(), x.requires_grad) for x in self.outputs],
            "by_name": self.by_name,
            "total": self.total.tolist(),
            "rest": (self.best, self.name, self.same, self.seen, list(self.recent), self.counts),
        }

    def on_validation_epoch_end(self):
        self.at_end = self.state()
        self.outputs.clear()


def engine_of(mesh, is_last):
    return SimpleNamespace(mesh=mesh, is_last=is_last, is_partial=False, stand_ins=(), num_samples=1)


def hooks_of(module, layout):
    mesh = Mesh(layout, device=CPU)
    is_last = mesh.pipeline_rank == layout.pipeline - 1
    hooks = SharedHooks(module, engine_of(mesh, is_last))
    hooks.install()
    return mesh


def shared():
    module = Recording()
    mesh = hooks_of(module, Layout(2, 2))
    outputs, by_name, same = module.outputs, module.by_name, module.same
    last = mesh.pipeline_rank == 1
    module.step(10.0 + mesh.data_rank if last else -100.0)
    module.on_validation_epoch_end()
    first = module.at_end
    kept = module.outputs is outputs and module.by_name is by_name and module.same is same
    if last:
        module.total += 1  # in place, and the only change of the second epoch
    module.name = "mine" if not last else module.name
    module.on_validation_epoch_end()
    return first, kept, module.at_end["total"], module.name, module._private


def test_hooks_see_what_the_last_stages_steps_left_in_the_same_objects():
    results = run_ranks(4, shared)
    for rank, (state, kept, total, name, private) in enumerate(results):
        value = 10.0 + rank % 2  # each replica its own
        assert [item[0] for item in state["outputs"]] == [-1, value]
        assert state["by_name"] == {"loss": [value], "n": 1}
        assert state["total"] == [value, value]
        assert state["rest"] == (value, f"after {value}", [1], {value}, [value + 1, value + 2], Counter({value: 2}))
        assert kept
        assert total == [value + 1, value + 1]
        assert name == (f"after {value}" if rank >= 2 else "mine")  # unchanged there, so not sent again
        assert private == value  # an underscore does not keep it from the hooks that read it
    assert not any(needs_grad for state, *_ in results[:2] for _, needs_grad in state["outputs"])


class Logging(Module):
    def __init__(self):
        super().__init__()
        self.own = SimpleNamespace(value=0.0)  # not plain state, so that each rank keeps its own

    def on_train_batch_end(self, *args):
        self.log("a", self.own.value)
        self.log("s", 1.0, reduce_fx="sum")
        self.log("m", self.own.value, reduce_fx="max", batch_size=3)
        return "returned"

    def on_validation_epoch_end(self):
        self.log("inner", self.own.value, reduce_fx="sum")

    def on_test_epoch_end(self):
        self.on_validation_epoch_end()
        self.log("outer", self.own.value)

    def on_train_end(self):
        self.ended = True

    def on_validation_start(self):
        if self.own.value == 100:  # one stage of one replica, not the last
            self.log("rare", 7.0)


def logged():
    module = Logging()
    mesh = hooks_of(module, Layout(2, 2))
    module.own.value = 2.0 + 2 * mesh.data_rank if mesh.pipeline_rank == 1 else 100.0 + mesh.data_rank
    returned = module.on_train_batch_end(None, None, 0)
    at_batch_end = list(module.logged)
    module.logged.clear()
    module.on_test_epoch_end()
    module.on_train_end()
    module.on_validation_start()
    return returned, at_batch_end, list(module.logged), module.ended


def test_what_hooks_log_is_the_last_stages_combined_over_the_replicas():
    results = run_ranks(4, logged)
    assert results == [results[0]] * 4
    returned, at_batch_end, later, _ = results[0]
    assert returned == "returned"
    assert at_batch_end == [("a", 3, "mean", 2), ("s", 2, "sum", 2), ("m", 4, "max", 2)]
    # a hook that is called by another is recorded once
    assert later == [("inner", 6, "sum", 2), ("outer", 3, "mean", 2), ("rare", 7, "mean", 1)]


def wrapped_names():
    module = Logging()
    own = module.on_train_end
    mesh = Mesh(Layout(1, 1), device=CPU)
    hooks = SharedHooks(module, engine_of(mesh, True))
    hooks.install()
    names = {name for name in vars(module) if name.startswith("on_")}
    hooks.install()  # a second time changes nothing
    module.own.value = 5.0
    module.on_validation_epoch_end()
    hooks.remove()
    hooks.remove()
    assert module.on_train_end == own
    return names, list(module.logged), {name for name in vars(module) if name.startswith("on_")}


def test_only_overridden_hooks_are_wrapped_and_they_are_given_back():
    ((names, log, left),) = run_ranks(1, wrapped_names)
    assert names == {
        "on_train_batch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_train_end", "on_validation_start"
    }  # fmt: skip
    assert log == [("inner", 5, "sum", 1)]
    assert left == set()


def unpicklable():
    module = Recording()
    mesh = hooks_of(module, Layout(2, 1))
    if mesh.pipeline_rank == 1:
        module.outputs.append(lambda: 1)
    with pytest.raises(RuntimeError, match=r"self\.outputs was changed .* cannot be pickled"):
        module.on_validation_epoch_end()
    return True


def test_what_cannot_be_sent_is_refused_on_all_stages_by_name():
    assert run_ranks(2, unpicklable) == [True, True]
