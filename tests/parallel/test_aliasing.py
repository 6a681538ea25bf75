import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_hybrid.compat import local_part, shard_memory, sharded_records
from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.zero.sharding import Sharded
from tests.launch import run_ranks, run_trainers
from tests.small import Small, fit, hybrid, loader, weights


class Model(nn.Module):
    """Sizes that no number of ranks divides: shards are padded, and empty on the last ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(2, 5), nn.Linear(5, 1)
        self.double()

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().sum()


def sharded(layout=(1, 2, 1, 1), **options):
    root = Model()
    data = Sharded(root, Mesh(Layout(*layout), device=torch.device("cpu")), **options)
    return root, data


def storage(tensor):
    return tensor.untyped_storage()


def records(data):
    return [record for module in data.modules for record in sharded_records(module)]


def run(root, data, *, reduce):
    data.begin([(0, 0)], reduce=reduce)
    result = data.step(lambda: Result([], root(torch.ones(3, 2, dtype=torch.float64))))
    data.before_backward(0, 0)
    result.output.backward()


def pieces(layout):
    """At every moment the shards are the right piece of the parameters, and have memory of their own, or not."""
    root, data = sharded(layout)
    start = {name: shard.full_tensor() for name, shard in data.sharded.items()}
    seen = []

    def look():
        owned = {storage(shard_memory(record)).nbytes() > 0 for record in records(data)}
        right = all(torch.equal(shard.full_tensor(), start[name]) for name, shard in data.sharded.items())
        whole = dict(root.named_parameters())
        inside = [storage(local_part(shard)).data_ptr() == storage(whole[n]).data_ptr() for n, shard in whole_of(whole)]
        seen.append((owned, right, all(inside)))

    def whole_of(whole):
        return [(n, shard) for n, shard in data.sharded.items() if whole[n] is not shard]

    look()
    run(root, data, reduce=False)
    look()
    run(root, data, reduce=True)
    look()
    data.gather()
    look()
    data.scatter()
    look()
    return seen


@pytest.mark.parametrize(("size", "layout"), [(2, (1, 2)), (4, (1, 4)), (4, (1, 4, 1, 2))])
def test_a_shard_is_a_piece_of_the_whole_parameter_while_there_is_one(size, layout):
    alone, within = ({True}, True, True), ({False}, True, True)
    assert run_ranks(size, pieces, layout) == [[alone, within, alone, within, alone]] * size


def writes():
    """What an optimizer or a callback writes is there after the reshard, wherever it was written."""
    root, data = sharded()
    run(root, data, reduce=False)
    with torch.no_grad():
        local_part(data.sharded["first.weight"]).fill_(3.0)
        root.second.weight.fill_(4.0)
    data.scatter()
    return [bool((data.sharded[f"{name}.weight"].full_tensor() == value).all()) for name, value in HALVES]


HALVES = [("first", 3.0), ("second", 4.0)]


def test_what_is_written_while_parameters_are_whole_is_kept():
    assert run_ranks(2, writes) == [[True, True]] * 2


def held():
    """A view that somebody keeps stays valid: its shard keeps its memory, and the others do not."""
    root, data = sharded()
    view = data.sharded["first.weight"].to_local()
    before = view.clone()
    run(root, data, reduce=False)
    owned = [storage(shard_memory(record)).nbytes() > 0 for record in records(data)]
    same = torch.equal(view, before)
    run(root, data, reduce=True)
    local_part(data.sharded["first.weight"]).add_(1.0)
    follows = torch.equal(view, before + 1.0)
    del view
    run(root, data, reduce=False)
    return sum(owned), same, follows, [storage(shard_memory(record)).nbytes() for record in records(data)]


def test_memory_that_somebody_looks_at_is_not_freed():
    assert run_ranks(2, held) == [(1, True, True, [0, 0, 0, 0])] * 2


def seen_by_numpy():
    """Its storage cannot be resized any more: the shard keeps its memory, and training goes on with right values."""
    root, data = sharded()
    data.sharded["first.weight"].to_local().detach().numpy().sum()
    for _ in range(2):
        run(root, data, reduce=False)
        owned = [storage(shard_memory(record)).nbytes() > 0 for record in records(data)]
        run(root, data, reduce=True)
    return sum(owned)


def test_memory_that_numpy_has_seen_is_not_freed():
    assert run_ranks(2, seen_by_numpy) == [1, 1]


def apart():
    """Types of their own, other devices and stage 3, where parameters are whole for moments, are left as they were."""
    found = []
    for options in ({"offload": True}, {"zero_stage": 3}):
        _, data = sharded(**options)
        data.gather()
        found.append(all(storage(shard_memory(record)).nbytes() > 0 for record in records(data)))
        data.scatter()
    return found


def test_offloaded_shards_and_those_of_stage_3_have_their_own_memory():
    assert run_ranks(2, apart) == [[True, True]] * 2


def failing():
    """After a step that has failed half-way the shards are those from before it."""
    _, data = sharded()
    start = {name: shard.full_tensor() for name, shard in data.sharded.items()}
    data.begin([(0, 0)], reduce=True)
    with pytest.raises(RuntimeError, match="half-way"):
        data.step(fail)
    data.abandon()
    same = [torch.equal(shard.full_tensor(), start[name]) for name, shard in data.sharded.items()]
    data.scatter()
    return all(same), all(torch.equal(s.full_tensor(), start[name]) for name, s in data.sharded.items())


def fail():
    raise RuntimeError("half-way")


def test_shards_outlive_a_step_that_fails():
    assert run_ranks(2, failing) == [(True, True)] * 2


class Shrinking(Small):
    """Its callback halves large weights after each batch, also within an accumulation window."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate)


class Shrink(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                part = local(parameter)
                part.copy_(torch.where(part.abs() > 0.1, 0.5 * part, part))
        for group in trainer.optimizers[0].param_groups:
            assert all(local(p).isfinite().all() for p in group["params"])


def shrunk(stages, data=1):
    found = []
    for stage in stages:
        options = {"accumulate_grad_batches": 3, "callbacks": [Shrink()]}
        strategy = "auto" if stage is None else hybrid(1, zero_stage=stage)
        found.append(weights(fit(Shrinking(), loader(48, 8, data), strategy, **options)))
    return found


def test_a_callback_may_change_weights_within_an_accumulation_window():
    (expected,) = shrunk([None])
    for state in run_trainers(2, shrunk, [0, 1, 2, 3], 2)[0]:
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)
