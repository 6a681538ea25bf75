"""Each private name of another library still does what we use it for; a test that fails here names what has moved."""

import inspect
import io
import pickle
import signal
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torchmetrics import SumMetric
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_hybrid import compat
from lightning_hybrid.optim import SM3, Lamb
from tests.launch import run_ranks
from tests.small import Small, fit, hybrid, loader, trainer_of


class Pairs(Small):
    def loss(self, batch):
        return sum(super(Pairs, self).loss(part) for part in batch if part is not None)


def test_every_function_has_a_test():
    text = Path(__file__).read_text()
    for name, function in inspect.getmembers(compat, inspect.isfunction):
        assert function.__module__ != compat.__name__ or f"compat.{name}(" in text, name


def test_a_combined_loader_tells_whether_its_loaders_cycle():
    trainer = trainer_of()
    assert not compat.loader_cycles(trainer)
    found = []
    for mode in ("max_size_cycle", "max_size", "min_size"):
        trainer = fit(Pairs(), CombinedLoader([loader(4, 4), loader(8, 4)], mode))
        found.append(compat.loader_cycles(trainer))
    assert found == [True, False, False]


def test_dispatch_mode_sees_operations_below_autograd():
    seen = []

    class Watch(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Watch():
        (x * 2).sum().backward()
        with compat.unseen():
            x.exp()
    assert torch.ops.aten.exp.default not in seen
    assert torch.ops.aten.mul.Tensor in seen
    assert torch.ops.aten.sum.default in seen
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_storage_key_belongs_to_the_storage():
    x, empty = torch.zeros(4), torch.empty(0)
    assert compat.storage_key(x) == compat.storage_key(x[1:].view(3, 1)) != compat.storage_key(x.clone())
    assert compat.storage_key(empty) != compat.storage_key(torch.empty(0))
    key = compat.storage_key(x)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(400)
    assert compat.storage_key(x) == key


def test_untyped_storage_of_what_torch_saves_is_the_tensors():
    seen = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if isinstance(value, torch.TypedStorage) or torch.is_storage(value):
                seen.append(compat.untyped(value))
            return "storage" if seen else None

    x = torch.ones(2)
    Pickler(io.BytesIO()).dump(x)
    assert seen == [x.untyped_storage()]
    assert seen[0] is x.untyped_storage() is compat.untyped(x.untyped_storage())


def test_fake_tensors_have_storages_without_memory():
    with compat.FakeTensorMode():
        x = torch.empty(2**40, dtype=torch.float8_e4m3fn)
    assert x.untyped_storage() is x.untyped_storage()
    assert (x.untyped_storage().nbytes(), x.untyped_storage().device.type) == (2**40, "meta")


def test_versions_are_set_of_all_that_count_together():
    x = torch.zeros(4)
    view, apart = x[:2].detach(), x.unsafe_chunk(2)[0]
    compat.set_versions((x,), (3,))
    assert [compat.version(tensor) for tensor in (x, view, apart)] == [3, 3, 0]


def test_version_counts_writes():
    x = torch.zeros(2)
    before = compat.version(x)
    x[0].add_(1)
    assert compat.version(x) == before + 1
    with torch.inference_mode():
        assert compat.version(torch.zeros(2)) == 0


def test_view_is_told_from_a_whole_tensor():
    x = torch.zeros(2, 2)
    assert compat.is_view(x[0])
    assert not compat.is_view(x)


def test_code_that_changes_what_is_loaded_is_found():
    class Pads(nn.Linear):
        def _load_from_state_dict(self, *args):
            super()._load_from_state_dict(*args)

    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_load_state_dict_pre_hook(lambda *args: None)
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1))
    metric, padded = nn.ModuleList([SumMetric()]), nn.Sequential(Pads(2, 2))
    found = [compat.reshapes_what_it_loads(module) for module in (plain, metric, hooked, padded)]
    assert found == [False, False, True, True]


def test_buffer_names_include_empty_ones():
    module = nn.Linear(2, 2)
    module.register_buffer("a", torch.zeros(1))
    module.register_buffer("b", None)
    module.inner = nn.BatchNorm1d(2)
    assert compat.buffer_names(module) == ["a", "b"]


@pytest.mark.parametrize("wanted", [False, True])
def test_wish_for_synchronised_batch_norm_is_found(wanted):
    strategy = hybrid(1)
    trainer_of(strategy, sync_batchnorm=wanted)
    assert compat.sync_batchnorm(strategy) == wanted


class Accumulating(Callback):
    def __init__(self):
        self.seen = []

    def on_before_backward(self, trainer, *args):
        self.seen.append(compat.is_accumulating(trainer))


def test_batches_before_the_last_of_a_window_are_known():
    callback = Accumulating()
    fit(Small(), loader(10, 2), callbacks=[callback], accumulate_grad_batches=2)
    assert callback.seen == [True, False, True, False, False]


def test_computed_value_is_kept_until_the_next_update():
    metric = SumMetric()
    metric.update(2.0)
    assert compat.cached_value(metric) is None
    assert metric.compute() == compat.cached_value(metric) == 2


def test_computed_value_can_be_set_and_forgotten_without_losing_the_state():
    metric = SumMetric()
    metric.update(2.0)
    compat.set_cached_value(metric, torch.tensor(7.0))
    assert metric.compute() == 7
    compat.set_cached_value(metric, None)
    assert metric.compute() == 2


class LogsMetric(Small):
    def __init__(self):
        super().__init__()
        self.metric = SumMetric()

    def training_step(self, batch, batch_idx):
        self.metric.update(1.0)
        compat.set_step_value(self.metric, torch.tensor(7.0 + batch_idx))
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return self.loss(batch)


def test_value_of_the_step_is_what_lightning_logs():
    metrics = fit(LogsMetric(), loader(4, 2)).callback_metrics
    assert (metrics["metric_step"], metrics["metric_epoch"]) == (8, 2)


def test_launcher_leaves_processes_alone_that_others_have_started(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # else the launcher chooses it
    launcher = compat.SubprocessLauncher(TorchElasticEnvironment(), 2, 1)
    assert launcher.launch(lambda value: value + 1, 2) == 3
    assert not launcher.is_interactive_compatible
    with pytest.raises(ValueError, match="does not match the world size"):
        compat.SubprocessLauncher(TorchElasticEnvironment(), 3, 1).launch(int)


def test_handlers_for_signals_are_those_that_lightning_would_register():
    trainer, called = trainer_of(), []
    own = compat.replace_signal_handlers(trainer, lambda *a: called.append("terminate"), lambda *a: called.append("x"))
    before = signal.getsignal(signal.SIGTERM)
    trainer._signal_connector.register_signal_handlers()
    signal.raise_signal(signal.SIGTERM)
    trainer._signal_connector.teardown()
    assert called == ["terminate"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert own.func is type(trainer._signal_connector)._slurm_sigusr_handler_fn
    assert trainer._signal_connector._slurm_sigusr_handler_fn is not own


def test_flag_that_ends_training_after_a_batch_can_be_set():
    trainer = trainer_of()
    assert not trainer.received_sigterm
    compat.set_received_sigterm(trainer)
    assert trainer.received_sigterm


def gathered(groups):
    group = dist.new_group([0, 1]) if groups else None
    output = torch.empty(4)
    compat.all_gather_flat(output, torch.tensor([1.0, 2.0]) + 10 * dist.get_rank(), group)
    return output.tolist()


@pytest.mark.parametrize("groups", [False, True])
def test_parts_are_gathered_in_rank_order(groups):
    assert run_ranks(2, gathered, groups) == [[1, 2, 11, 12]] * 2


def test_a_condition_is_checked_where_it_is():
    compat.assert_on_device(torch.tensor(True))
    with pytest.raises(RuntimeError, match="nonzero"):
        compat.assert_on_device(torch.tensor(False))


def scattered():
    part = torch.empty(2)
    compat.reduce_scatter_flat(part, torch.arange(4.0) + 10 * dist.get_rank())
    return part.tolist()


def test_sums_are_scattered_in_rank_order():
    assert run_ranks(2, scattered) == [[10, 12], [14, 16]]


def test_backward_passes_are_known_in_their_hooks_and_callbacks():
    seen, x = [], torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(compat.in_backward()))
    assert not compat.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not compat.in_backward()


def test_backward_passes_have_numbers_of_their_own():
    passes, x = [], torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        for tensor in (y, y.sum()):
            tensor.register_hook(lambda gradient: passes.append(compat.backward_pass()))
        tensor.backward()
    assert passes[0] == passes[1] != passes[2] == passes[3]
    assert -1 not in passes
    assert compat.backward_pass() == -1


def test_negative_views_share_memory():
    x = torch.ones(2)
    assert compat.negative_view(x).is_neg()
    assert compat.negative_view(x).tolist() == [-1, -1]
    assert compat.negative_view(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_the_innermost_saved_tensor_hooks_are_known():
    assert compat.outer_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(str, int), torch.autograd.graph.saved_tensors_hooks(abs, round):
        assert compat.outer_hooks() == (abs, round)
    assert compat.outer_hooks() is None


def seen_before_the_backend():
    seen, library = [], torch.library.Library("c10d", "IMPL")
    kernel = compat.before_backend(torch.ops.c10d.allreduce_.default, seen.append)
    library.impl("allreduce_", kernel, "BackendSelect", with_keyset=True)
    x = torch.ones(2)
    dist.all_reduce(x)
    del library
    dist.all_reduce(x)
    return x.tolist(), len(seen), seen[0][0][0].tolist()


def test_kernel_before_the_backend_sees_arguments_and_goes_on():
    assert run_ranks(2, seen_before_the_backend) == [([4, 4], 1, [4, 4])] * 2  # it saw the tensor itself, once


def test_compiled_modules_and_functions_are_known():
    module = nn.Linear(2, 2)
    assert not compat.is_compiled(module)
    assert not compat.is_compiled_function(module.forward)
    assert not isinstance(module, compat.OptimizedModule)
    assert isinstance(torch.compile(module, backend="eager"), compat.OptimizedModule)
    module.compile(backend="eager")
    assert compat.is_compiled(module)
    setattr(module, compat.COMPILED_CALL, lambda x: "answered")
    assert module(None) == "answered"
    assert compat.is_compiled_function(torch.compile(module.forward, backend="eager"))


def test_own_parameters_are_found_behind_a_property():
    module = nn.Linear(2, 3)
    module.__class__ = type("Hidden", (nn.Linear,), {"weight": property(lambda self: None)})
    assert isinstance(compat.own_parameters(module)["weight"], nn.Parameter)
    assert set(compat.own_parameters(module)) == {"weight", "bias"}


def test_what_is_put_among_own_parameters_is_what_a_module_computes_with():
    for module in (nn.Linear(2, 2), nn.GRU(2, 2)):
        for name in compat.own_parameters(module):
            compat.own_parameters(module)[name] = torch.zeros_like(getattr(module, name))
        compat.refresh_weights(module)
        result = module(torch.ones(1, 2))
        assert not (result[0] if isinstance(result, tuple) else result).any()


def test_a_method_of_an_instance_takes_the_place_of_what_changes_all_tensors():
    module = nn.Linear(2, 2)
    vars(module)[compat.APPLY] = lambda fn, recurse=True: "answered"
    assert module.half() == "answered"


def test_a_subclass_can_be_a_plain_tensor_for_a_while():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    loud = torch.ones(2).as_subclass(Loud)
    with compat.without_torch_function():
        with compat.without_torch_function():
            pass
        assert type(loud + 1) is torch.Tensor
    with pytest.raises(AssertionError):
        loud + 1


def test_vmap_maps_over_what_its_arguments_are_changed_to():
    double, ones = torch.vmap(lambda row: row * 2), torch.ones(2, 3)
    with compat.before_vmap(lambda args: (args[0] + 1,)):
        assert double(ones).tolist() == [[4.0] * 3] * 2
    assert double(ones).tolist() == [[2.0] * 3] * 2


def test_an_attribute_is_replaced_for_a_while():
    class Owner:
        name = 1

    with compat.replaced(Owner, "name", 2):
        assert Owner.name == 2
    assert Owner.name == 1


def test_copied_structure_shares_no_registry():
    module = nn.LSTM(2, 3)
    module.child = nn.Linear(2, 2)
    twin = compat.copied_structure(module)
    weight = module.weight_ih_l0
    twin.weight_ih_l0 = nn.Parameter(torch.zeros(12, 2))
    twin.child = nn.Linear(3, 3)
    assert module.weight_ih_l0 is weight is next(w for w in module._flat_weights if w.shape == (12, 2))
    assert module.child.in_features == 2
    assert type(twin) is nn.LSTM


def test_private_reset_is_that_of_torchs_attention():
    layer = nn.MultiheadAttention(4, 2)
    nn.init.ones_(layer.in_proj_bias)
    reset = compat.private_reset(layer)
    reset()
    assert not layer.in_proj_bias.any()
    assert compat.private_reset(nn.Linear(2, 2)) is None


def test_weights_method_is_that_of_transformers():
    model = GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=2, n_positions=4, vocab_size=3))
    layer = nn.Linear(2, 2)
    compat.weights_method(model)(layer)
    assert not layer.bias.any()
    assert compat.weights_method(layer) is None


def test_written_tensors_are_what_an_operation_changes():
    a, b = torch.zeros(2), torch.ones(2)
    assert compat.written_tensors(torch.ops.aten.add_.Tensor, (a, b), {}) == [a]
    assert compat.written_tensors(torch.ops.aten.add.Tensor, (a, b), {}) == []
    (written,) = compat.written_tensors(torch.ops.aten.add.out, (a, b), {"out": a})
    assert written is a
    assert compat.written_tensors(torch.ops.aten._foreach_zero_.default, ([a, b],), {})[1] is b


def shards_and_records():
    """`fully_shard`'s records, before, in and after the time when parameters are whole."""
    net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 4, bias=False))
    fully_shard(net[0], reshard_after_forward=False)
    fully_shard(net, reshard_after_forward=False)
    compat.free_early(net)
    records = [*compat.sharded_records(net[0]), *compat.sharded_records(net)]
    shards = [record.sharded_param for record in records]
    owned = [compat.num_holders(compat.shard_memory(record)) for record in records]
    views = [shard.to_local() for shard in shards]
    more = [compat.num_holders(compat.shard_memory(r)) - number for r, number in zip(records, owned, strict=True)]
    same = [torch.equal(compat.local_part(shard), view) for shard, view in zip(shards, views, strict=True)]
    freed = []
    net[1].register_forward_pre_hook(lambda *_: freed.append(net._get_fsdp_state()._comm_ctx.all_gather_state is None))
    net(torch.ones(1, 3))
    sizes = [record.all_gather_outputs[0].numel() for record in records]
    compat.set_local_part(shards[0], torch.full_like(views[0], 7.0))
    return more, same, freed, sizes, bool((shards[0].to_local() == 7).all())


def test_records_of_shards_are_what_the_parameters_are_made_of():
    """With padding, two ranks have six of five rows."""
    assert run_ranks(2, shards_and_records) == [([1, 1], [True, True], [True], [18, 20], True)] * 2


def states_and_groups():
    """What runs around `fully_shard`'s two steps, and what it does with one of two modules that it got together."""
    net, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), []
    fully_shard([net[0], net[1]])
    fully_shard(net)
    (group,) = compat.sharded_groups(net[1])

    def first(x):
        y = net[0](x)
        y.register_hook(compat.before_backward(net[0]))
        return y

    compat.around_states(
        group,
        after_whole=lambda: seen.append(("whole", type(net[0].weight) is nn.Parameter)),
        before_shard=lambda: seen.append(("shard", type(net[1].weight) is nn.Parameter)),
    )
    net.forward = first
    net(torch.ones(1, 2)).sum().backward()
    return seen, net[0].weight.grad.full_tensor().tolist()


def test_modules_that_are_sharded_together_may_be_called_alone():
    once = [("whole", True), ("shard", True)]
    assert run_ranks(2, states_and_groups) == [(once * 2, [[1.0, 1.0]] * 2)] * 2


def test_holders_of_memory_are_counted():
    x = torch.zeros(3)
    before = compat.num_holders(x)
    view = x[1:]
    assert compat.num_holders(view) == compat.num_holders(x) == before + 1


def test_operations_have_kernels_for_autocast():
    assert compat.has_kernel("aten::linear", "AutocastCPU")
    assert not compat.has_kernel("aten::layer_norm", "AutocastCPU")


def waiting():
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("shard",))
    model = fully_shard(nn.Linear(2, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_requires_gradient_sync(False)
    model(torch.ones(4, 2)).sum().backward()
    weight, _ = compat.sharded_records(model)
    found = weight.unsharded_accumulated_grad.clone()
    assert weight.unsharded_param.dtype == torch.bfloat16
    assert weight.sharded_param.requires_grad
    return found.dtype, found.tolist()


def two_copies():
    """A model of which each of two replicas has all shards."""
    ranks = torch.tensor([[0], [1]])
    groups = [dist.group.WORLD, dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(2, 1, bias=False), mesh=mesh)
    model.set_gradient_divide_factor(1.0)
    return model


def partial_sums():
    """The sum over both copies waits for the last backward pass."""
    model = two_copies()
    (group,) = compat.sharded_groups(model)
    for is_last in (False, True):
        model.set_requires_all_reduce(is_last)
        model(torch.ones(1, 2)).sum().backward()
        compat.set_partial_sum(group, None)
    return model.weight.grad.to_local().tolist()


def test_sums_over_a_part_of_the_replicas_can_be_dropped():
    assert run_ranks(2, partial_sums) == [[[2.0, 2.0]]] * 2


def replaced_sums():
    model = two_copies()
    (group,) = compat.sharded_groups(model)
    (record,) = group.fsdp_params
    assert compat.partial_sum(group) is None
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 2)).sum().backward()
    flat = compat.partial_sum(group)
    assert flat.numel() == compat.shard_memory(record).numel()
    compat.set_partial_sum(group, 10 * flat)
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 2)).sum().backward()
    return flat.tolist(), model.weight.grad.to_local().tolist()


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="used since torch 2.13")
def test_sums_over_a_part_of_the_replicas_can_be_replaced():
    assert run_ranks(2, replaced_sums) == [([1.0, 1.0], [[22.0, 22.0]])] * 2


def test_gradients_wait_in_the_type_of_their_sum():
    assert run_ranks(2, waiting) == [(torch.float32, [[4.0, 4.0]] * 3)] * 2


def test_gradients_are_unscaled_where_they_are_and_what_is_not_finite_is_found():
    for dtype in (torch.float32, torch.float64):
        for wrong in (1.0, float("inf"), float("nan")):
            gradients = [torch.tensor([4.0, 8.0], dtype=dtype), torch.tensor([wrong], dtype=dtype)]
            found = torch.zeros(1)
            compat.unscale(gradients, found, torch.tensor([0.25]))
            assert gradients[0].tolist() == [1.0, 2.0]
            assert found.item() == (wrong != 1.0)


class Skipping(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if batch_idx == 1:
            compat.forget_step(self.trainer)


def test_a_step_that_is_forgotten_is_not_counted():
    assert fit(Skipping(), loader(12, 4)).global_step == 2


class Hooked(Small):
    def on_before_optimizer_step(self, optimizer):
        self.seen = optimizer

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            compat.before_step(self.trainer.precision_plugin, self, "an optimizer")
            assert self.seen == "an optimizer"
        return super().training_step(batch, batch_idx)


def test_hooks_before_a_step_can_be_called():
    assert fit(Hooked(), loader(8, 4)).global_step == 2


def test_a_context_is_around_the_collection_of_a_checkpoint_alone(tmp_path):
    entered = []

    @contextmanager
    def noting():
        entered.append("in")
        yield
        entered.append("out")

    trainer = fit(Small(), loader(8, 4))
    for _ in range(2):  # the second context takes the place of the first
        compat.around_dump(trainer, noting)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert entered == ["in", "out"]
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 2


def test_places_in_files_are_what_torch_reads():
    place = compat.place_in_file("__0_0.distcp", 64, 128)
    assert (place.relative_path, place.offset, place.length, place.transform_descriptors) == (
        "__0_0.distcp",
        64,
        128,
        None,
    )


def test_floating_buffers_stay_wide_when_a_module_is_cast():
    class Wide(compat.WideBuffers):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("bias", torch.tensor([1 + 2**-20]))
            self.register_buffer("count", torch.tensor([3]))
            self.register_buffer("nothing", None)

    for cast, bias in (
        (nn.Module.half, torch.float32),
        (nn.Module.bfloat16, torch.float32),
        (nn.Module.double, torch.float64),
    ):
        model = cast(nn.Sequential(Wide()))
        assert model[0].weight.dtype != torch.float32
        assert model[0].bias.dtype == bias
        assert model[0].bias.item() == 1 + 2**-20
        assert model[0].count.dtype == torch.int64
    moved = nn.Sequential(Wide()).to("meta", torch.float16)
    assert moved[0].bias.is_meta
    assert moved[0].bias.dtype == torch.float32


def test_max_pools_run_in_a_function_of_python_that_knows_their_window():
    found, window = [], ("kernel_size", "stride", "padding", "dilation")

    def pack(tensor):
        frame = inspect.currentframe().f_back
        found.append((frame.f_code, {name: frame.f_locals[name] for name in window}))
        return tensor

    x = torch.randn(1, 1, 8, 8, requires_grad=True)
    for pool in (nn.MaxPool2d(3, 2, 1), lambda x: F.max_pool2d(x, 3, stride=2, padding=1)):
        found.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            pool(x)
        assert [code for code, _ in found] == [compat.MAX_POOL] * 2
        assert found[0][1] == {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1}


def test_an_operation_on_lists_is_the_operation_on_each():
    first, second = [torch.arange(3.0), torch.ones(2, 2)], [torch.ones(3), torch.full((2, 2), 2.0)]
    compat.foreach("add_")(first, second, alpha=2.0)
    assert torch.equal(first[0], torch.arange(3.0) + 2)
    assert torch.equal(first[1], torch.full((2, 2), 5.0))
    assert [norm.item() for norm in compat.foreach("norm")(second, 2, dtype=torch.float64)] == [3**0.5, 4.0]


def flattened_parts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = FullyShardedDataParallel(nn.Linear(3, 4), use_orig_params=True, device_id=torch.device("cpu"))
    refused = []
    for kind in (Lamb, SM3):
        try:
            kind(module.parameters(), lr=0.1)
        except RuntimeError as error:
            refused.append(str(error))
    return [compat.is_flattened(parameter) for parameter in module.parameters()], refused


def test_pieces_of_flat_parameters_are_known_and_refused_where_wholes_are_needed():
    assert not compat.is_flattened(nn.Parameter(torch.ones(2)))
    for known, refused in run_ranks(2, flattened_parts):
        assert known == [True, True]
        assert len(refused) == 2
        assert all("Shard with fully_shard instead" in message for message in refused)


def test_another_function_runs_the_batches_of_a_training_loop():
    seen = []

    class Around(Callback):
        def on_fit_start(self, trainer, pl_module):
            for name in ("inner", "outer"):
                self.stop = compat.around_advance(trainer, partial(self.run, trainer.fit_loop, name))

        def run(self, loop, name, advance, fetcher):
            seen.append((name, loop.batch_idx))
            advance(fetcher)
            seen.append((name, loop.batch_idx))

        def on_train_end(self, trainer, pl_module):
            self.stop()

    trainer = fit(Small(), loader(8, 4), callbacks=[Around()])
    assert seen[:4] == [("outer", -1), ("inner", -1), ("inner", 0), ("outer", 0)]
    assert len(seen) == 8
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)


class SumsAndScales(Callback):
    """Looks at what an epoch has logged, and takes back what a scaler has noted."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.sums = {name: float(metric.value) for name, metric in compat.logged(trainer).items()}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        compat.forget_unscaled(trainer.precision_plugin)
        trainer.precision_plugin.scaler.unscale_(optimizer)  # which is refused a second time


def test_an_epoch_has_sums_of_what_was_logged_and_a_scaler_forgets_that_it_has_unscaled():
    class Logs(Small):
        def training_step(self, batch, batch_idx):
            self.log("number", float(batch_idx + 1), on_step=False, on_epoch=True, batch_size=1)
            return super().training_step(batch, batch_idx).float()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    looks = SumsAndScales()
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit(Logs(), loader(12, 4), callbacks=[looks], plugins=[precision])
    assert looks.sums == {"training_step.number": 6.0}


def test_an_average_of_weights_is_known():
    average = WeightAveraging()
    fit(Small(), loader(8, 4), callbacks=[average])
    found = compat.averaged_model(average)
    assert len(list(found.parameters())) == len(list(Small().parameters()))
    assert compat.averaged_model(Callback()) is None


def test_a_checkpoint_is_saved_again_at_a_step_that_comes_again(tmp_path):
    class SavesAgain(Callback):
        def on_train_end(self, trainer, pl_module):
            compat.forget_saved(saving, trainer.global_step)
            saving.on_train_batch_end(trainer, pl_module, None, None, 1)
            self.before = len(list(tmp_path.iterdir()))
            compat.forget_saved(saving, trainer.global_step - 1)
            saving.on_train_batch_end(trainer, pl_module, None, None, 1)

    saving, again = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2), SavesAgain()
    fit(Small(), loader(8, 4), callbacks=[again, saving], enable_checkpointing=True)
    assert (again.before, len(list(tmp_path.iterdir()))) == (1, 2)
