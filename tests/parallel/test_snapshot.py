import copy
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_hybrid.compat import version
from lightning_hybrid.parallel.pipeline.frozen import Frozen
from lightning_hybrid.parallel.pipeline.snapshot import Snapshot, plain_attributes

CPU = torch.device("cpu")


def module_with(**attributes):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def after_a_run(module, run):
    """Names of attributes that changed, after `run(module)` inside a snapshot."""
    with Snapshot(module, CPU) as snapshot:
        run(module)
        return [name for name, _ in snapshot.changed(module)]


CHANGES = {  # a value, and what a run does with module.x
    "number": (1, lambda m: setattr(m, "x", 2)),
    "text": ("a", lambda m: setattr(m, "x", "b")),
    "none": (None, lambda m: setattr(m, "x", 0)),
    "type": (1, lambda m: setattr(m, "x", 1.0)),
    "list": ([1, 2], lambda m: m.x.append(3)),
    "shorter list": ([1, 2], lambda m: m.x.pop()),
    "order": ([1, 2], lambda m: m.x.reverse()),
    "new list": ([1], lambda m: setattr(m, "x", [1, 2])),
    "dictionary": ({"a": 1}, lambda m: m.x.update(b=2)),
    "old key": ({"aux": None}, lambda m: m.x.update(aux=torch.ones(()))),
    "set": ({1}, lambda m: m.x.add(2)),
    "deque": (deque([1, 2], maxlen=2), lambda m: m.x.append(3)),
    "counter": (Counter("aab"), lambda m: m.x.update("bb")),
    "ordered": (OrderedDict(a=1, b=2), lambda m: m.x.move_to_end("a")),
    "default": (defaultdict(list, a=[1]), lambda m: m.x["b"].append(1)),
    "list in a dictionary": ({"train": [1.0]}, lambda m: m.x["train"].append(2.0)),
    "three deep": ([{"a": {1: [2]}}], lambda m: m.x[0]["a"][1].clear()),
    "tensor": (torch.ones(2), lambda m: setattr(m, "x", torch.zeros(2))),
    "tensor in place": (torch.ones(2), lambda m: m.x.mul_(3)),
    "tensor in a list": ([torch.ones(2)], lambda m: m.x[0].zero_()),
    "added up": (torch.zeros(()), lambda m: m.__dict__.update(x=m.x.add_(1))),
}
each_change = pytest.mark.parametrize(("value", "run"), CHANGES.values(), ids=CHANGES.keys())


@each_change
def test_what_a_run_does_to_an_attribute_is_noticed_and_undone_in_the_same_object(value, run):
    value = copy.deepcopy(value)
    module, before = module_with(x=value), repr(value)
    assert after_a_run(module, run) == ["x"]
    assert module.x is value
    assert repr(module.x) == before


@each_change
def test_an_attribute_that_nobody_touches_is_not_reported(value, run):
    value = copy.deepcopy(value)
    module, before = module_with(x=value), repr(value)
    assert after_a_run(module, lambda _: None) == []
    assert repr(module.x) == before


@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.nan), [torch.full((2,), math.nan)], {"a": math.nan}])
def test_nan_is_no_change(value):
    assert after_a_run(module_with(x=value), lambda _: None) == []


def test_equal_numbers_and_tensors_are_no_change():
    module = module_with(n=3, t=torch.ones(2))

    def run(module):
        module.n, module.t = int("3"), torch.ones(2)

    assert after_a_run(module, run) == []


def test_new_attributes_are_reported_and_removed_and_deleted_ones_come_back():
    module = module_with(old=1)

    def run(module):
        del module.old
        module.new = torch.ones(1)

    assert after_a_run(module, run) == ["new"]
    assert plain_attributes(module) == {"training": True, "old": 1}


def test_a_tensor_that_two_attributes_share_is_still_one_afterwards():
    scale = torch.ones(2, requires_grad=True)
    module = module_with(a=scale, b=scale, child=module_with(c=scale))
    with Snapshot(module, CPU), torch.no_grad():
        module.a.add_(1)
    assert module.a is module.b is module.child.c is scale
    assert scale.tolist() == [1, 1]
    assert scale.requires_grad


def test_containers_that_hold_themselves_end():
    knot = [1]
    knot.append(knot)
    module = module_with(x=knot)
    assert after_a_run(module, lambda m: m.x.append(2)) == ["x"]
    assert len(knot) == 2
    assert knot[1] is knot


def test_untouched_tensors_are_not_written():
    x = torch.ones(2)
    before = version(x)
    after_a_run(module_with(x=x, y=[x]), lambda _: None)
    assert version(x) == before


def test_tensors_of_inference_mode_pass_and_are_set_back():
    with torch.inference_mode():
        value = torch.ones(2)
        buffer = torch.ones(2)
    module = module_with(x=value)
    module.register_buffer("b", buffer)
    after_a_run(module, lambda _: None)
    assert module.x is value
    assert module.b is buffer
    with torch.inference_mode():
        after_a_run(module, lambda m: (m.x.add_(1), m.b.add_(1)))
    assert module.x.tolist() == module.b.tolist() == [1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.zeros(1).expand(3),
    ],
    ids=["sparse", "csr", "expanded"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_of_other_layouts_pass(make):
    value = make()
    module = module_with(x=value)
    assert after_a_run(module, lambda _: None) == []
    assert module.x is value


def test_objects_are_kept_by_reference():
    thing = object()
    module = module_with(x=thing)
    assert after_a_run(module, lambda m: setattr(m, "x", object())) == ["x"]
    assert module.x is thing


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", None)
        self.register_buffer("still", torch.ones(1), persistent=False)


def test_buffers_are_noticed_and_undone_written_replaced_or_new():
    module = Buffers()
    mean, before = module.mean, {name: buffer.clone() for name, buffer in module.named_buffers()}
    with Snapshot(module, CPU) as snapshot:
        module.norm(torch.randn(4, 2))
        module.mean = 0.9 * module.mean + 1
        assert snapshot.changed_buffers(module) == ["mean"]
        assert set(snapshot.changed_buffers(module.norm)) == {"running_mean", "running_var", "num_batches_tracked"}
    assert module.mean is mean
    after = dict(module.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_buffer_that_the_run_sets_for_the_first_time_is_gone():
    module = Buffers()
    with Snapshot(module, CPU):
        module.late = torch.ones(1)
        module.norm.register_buffer("brand_new", torch.ones(1))
    assert module.late is None
    assert not hasattr(module.norm, "brand_new")


def test_parameters_stay_as_the_run_left_them():
    module = nn.Linear(2, 2)
    weight = module.weight
    with Snapshot(module, CPU), torch.no_grad():
        weight.fill_(4.0)
    assert module.weight is weight
    assert weight.tolist() == [[4, 4], [4, 4]]


def test_metrics_forget_what_the_run_told_them():
    module = module_with(mean=MeanMetric(), all=CatMetric())
    module.mean.update(1.0)
    with Snapshot(module, CPU):
        module.mean.update(5.0)
        module.all.update(torch.ones(3))
    assert (module.mean.compute().item(), module.mean.update_count) == (1.0, 1)
    assert not module.all.update_called
    module.all.update(torch.zeros(2))
    assert module.all.compute().tolist() == [0, 0]


def test_training_mode_is_restored_in_every_module():
    module = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    with Snapshot(module, CPU):
        module.eval()
    assert all(part.training for part in module.modules())


def draws():
    return torch.rand(1).item(), random.random(), numpy.random.rand()


def test_all_random_streams_are_as_before():
    module = nn.Linear(1, 1)
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    expected = draws()
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    with Snapshot(module, CPU):
        torch.manual_seed(9), random.seed(9), numpy.random.seed(9)
        draws()
    assert draws() == expected


def run_and_fail(module):
    module.mean.add_(1)
    module.seen.append(1)
    raise ValueError("in the run")


def test_everything_is_put_back_when_the_run_fails():
    module = Buffers()
    module.seen = []
    with pytest.raises(ValueError, match="in the run"):
        after_a_run(module, run_and_fail)
    assert module.mean.tolist() == [0, 0]
    assert module.seen == []


def test_a_frozen_value_can_be_compared_with_another_object():
    frozen = Frozen({"a": [torch.ones(2)], "b": 1})
    assert not frozen.differs({"a": [torch.ones(2)], "b": 1})
    assert frozen.differs({"a": [torch.ones(3)], "b": 1})
    assert frozen.differs({"a": [torch.ones(2)], "b": True})
    assert frozen.differs(OrderedDict(a=[torch.ones(2)], b=1))
    assert frozen.differs({"b": 1})
    assert frozen.differs(None)
