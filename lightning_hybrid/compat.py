"""Every private name of another library that we use, each with its reason; tests/test_compat.py fails if one moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn

# What torch.compile(module) returns; torch has no public way to recognise one.
from torch._dynamo import OptimizedModule as OptimizedModule

# Where torch.vmap takes its arguments.
from torch._functorch import vmap

# Tensors without memory that torch.serialization.skip_data saves; torch documents them, but keeps them private.
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.fsdp import FSDPModule, fully_shard

# The only way to see every operation of a step; torch documents it, but keeps it in a private module.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import Strategy
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer
    from torchmetrics import Metric

unseen = _disable_current_modes  # context for operations that no such mode is to see
set_versions = torch._C._autograd._unsafe_set_version_counter  # what `version` gives, of all that count together


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage; its address is 0 for every empty storage and changes when FSDP resizes one."""
    return int(tensor.untyped_storage()._cdata)


def untyped(storage: torch.UntypedStorage | torch.TypedStorage) -> torch.UntypedStorage:
    """What torch.save hands to a pickler as a tensor's storage, without its type; the public way to it warns."""
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


def place_in_file(file: str, offset: int, nbytes: int) -> Any:
    """What the metadata of a distributed checkpoint says of a tensor; torch's own writers make it themselves."""
    return _StorageInfo(file, offset, nbytes)


def version(tensor: Tensor) -> int:
    """How often a tensor's memory has been written in place; inference tensors do not count, so 0 stands for them."""
    return 0 if tensor.is_inference() else int(tensor._version)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd sees the tensor as a view of another."""
    return bool(tensor._is_view())


def reshapes_what_it_loads(module: nn.Module) -> bool:
    """Whether the user's code, hooks or methods, may change tensors between a state and the module; FSDP's does not."""
    functions: list[Any] = [module.load_state_dict, *(part._load_from_state_dict for part in module.modules())]
    hooks: list[Any] = [hook for part in module.modules() for hook in part._load_state_dict_pre_hooks.values()]
    functions += [hook.hook for hook in hooks]
    libraries = {str(getattr(function, "__module__", None)).partition(".")[0] for function in functions}
    return not libraries <= {"torch", "torchmetrics"}


def buffer_names(module: nn.Module) -> list[str]:
    """Names of a module's own buffers, those that are None too: `named_buffers` leaves them out."""
    return list(module._buffers)


class WideBuffers(nn.Module):
    """Its own floating buffers stay at least float32 when it is cast, as by `half()` or 16-bit precision of a Trainer.

    `to`, `half` and `cuda` all go through `_apply`; there is no public hook.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if after is not None and after.is_floating_point() and after.dtype.itemsize < min(buffer.dtype.itemsize, 4):
                self._buffers[name] = buffer.to(after.device)
        return self


COMPILED_CALL = "_compiled_call_impl"
"""Attribute in which `Module.compile` leaves the compiled call, and where calls look for it."""


def is_compiled(module: nn.Module) -> bool:
    """Whether `Module.compile` was called on it."""
    return getattr(module, COMPILED_CALL) is not None


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile` returned the function (or decorates the method): its original is a private attribute."""
    return hasattr(function, "_torchdynamo_orig_callable")


def sync_batchnorm(strategy: Strategy) -> bool:
    """Whether `Trainer(sync_batchnorm=True)`: Lightning leaves the request in a private attribute of the strategy."""
    return getattr(strategy, "_layer_sync", None) is not None


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the running batch is not the last of its accumulation window; Lightning asks this and tells nobody."""
    return bool(trainer.fit_loop._should_accumulate())


def loader_cycles(trainer: Trainer) -> bool:
    """Whether a short training loader begins anew when it ends before others; `CombinedLoader` hides its mode."""
    loader = trainer.fit_loop._combined_loader
    return loader is not None and loader._mode == "max_size_cycle"


def forget_step(trainer: Trainer) -> None:
    """Take back the step that Lightning's `optimizer_step` is about to count, skipped or not: a scaler skipped it."""
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    for count in (progress.total, progress.current):
        count.completed -= 1


def before_step(precision: Precision, module: LightningModule, optimizer: Optimizer) -> None:
    """Call the hooks before a step of the optimizer, and clip; Lightning's plugins share that by a private method."""
    precision._after_closure(module, optimizer)


def cached_value(metric: Metric) -> Any:
    """The value that `compute` keeps until the next `update` or `reset`, or None."""
    return metric._computed


def set_cached_value(metric: Metric, value: Any) -> None:
    """Set or (with None) forget the value that `compute` keeps; no public method does that without losing the state."""
    metric._computed = value


def set_step_value(metric: Metric, value: Any) -> None:
    """Set what Lightning logs with `on_step=True` for a metric object: `forward` keeps it in a private attribute."""
    metric._forward_cache = value


SubprocessLauncher = _SubprocessScriptLauncher
"""The launcher that runs the script again for each process; there is no public class to derive from."""


def replace_signal_handlers(
    trainer: Trainer, terminate: Callable[[int, Any], None], requeue: Callable[[int, Any], None]
) -> Callable[[int, Any], None]:
    """Let Lightning register these for SIGTERM and for SLURM's requeue signal; its own communicate inside the handler.

    Returns:
        Lightning's own for the requeue signal, for every rank to call between two batches.
    """
    connector = trainer._signal_connector
    vars(connector).update(_sigterm_notifier_fn=terminate, _slurm_sigusr_handler_fn=requeue)
    return partial(type(connector)._slurm_sigusr_handler_fn, connector)


def set_received_sigterm(trainer: Trainer) -> None:
    """Make Lightning raise SIGTERMException at the end of the batch; its handler alone would set this."""
    trainer._signal_connector.received_sigterm = True


def all_gather_flat(output: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather one tensor of each rank into one; torch 2.13 renamed the function and warns about 2.11's name."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(output, part, group=group)


def reduce_scatter_flat(part: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Reduce-scatter along a first dimension; torch 2.13 has a new name and warns of the old one."""
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    scatter(part, whole, group=group)


def sharded_records(module: nn.Module | FSDPModule) -> list[Any]:
    """What `fully_shard` knows of each parameter of one of its modules: it has no public name, nor has its memory.

    Gradients that wait in the type of their sum are there alone, as `unsharded_accumulated_grad`: None, or of the whole
    parameter's shape.
    """
    return [record for group in sharded_groups(module) for record in group.fsdp_params]


def partial_sum(group: Any) -> Tensor | None:
    """One of those of `sharded_groups`' sums over its shards alone, which wait for the last backward pass of a window.

    It is flat: padded shards, like `shard_memory`, of the parameters that are trained, in order.
    """
    flat: Tensor | None = group._partial_reduce_output
    return flat


def set_partial_sum(group: Any, flat: Tensor | None) -> None:
    """Let the last backward pass of a window add this, or nothing."""
    group._partial_reduce_output = flat


def before_backward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Hook for an output of any of several modules that `fully_shard` got together: it has one for the last's alone."""
    return fully_shard.state(module)._pre_backward  # type: ignore[attr-defined]


def sharded_groups(module: nn.Module | FSDPModule) -> list[Any]:
    """What `fully_shard` knows of parameters of one of its modules that are gathered together."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13; one at most before
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def around_states(group: Any, *, after_whole: Callable[[], object], before_shard: Callable[[], object]) -> None:
    """Let two functions run at all steps from a group's shards to whole parameters and back: there are no hooks."""
    to_whole, to_shard = group._to_unsharded, group._to_sharded
    group._to_unsharded = lambda: (to_whole(), after_whole())
    group._to_sharded = lambda: (before_shard(), to_shard())


def shard_memory(record: Any) -> Tensor:
    """The shard that a record owns: flat, with padding."""
    return record._sharded_param_data


def local_part(tensor: DTensor) -> Tensor:
    """What a DTensor has here; `to_local` makes a new view of it."""
    part: Tensor = tensor._local_tensor
    return part


def set_local_part(tensor: DTensor, part: Tensor) -> None:
    """Let a DTensor have other memory of the same shape; `fully_shard` does this too, in this way."""
    tensor._local_tensor = part


def num_holders(tensor: Tensor) -> int:
    """How many tensors and other objects hold a tensor's memory; no public function tells."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def free_early(root: nn.Module) -> None:
    """Let modules of `fully_shard` free the buffer of a gather when it is copied out, not behind the next gather.

    That keeps one buffer less. It is what torch does for gathers that are asynchronous, and no public method makes the
    implicit ones so. Where there are no streams, as with gloo, only asynchronous ones overlap with computation.
    """
    root._set_unshard_async_op(True)  # type: ignore[operator]


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Where a module keeps its own parameters, whatever its attributes say; what is put there shows in their place."""
    return module._parameters


def refresh_weights(module: nn.Module) -> None:
    """Let `nn.LSTM` and the like compute with the parameters that they show: they keep a list of them beside."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


MAX_POOL = nn.functional._max_pool2d.__code__  # type: ignore[attr-defined]  # runs for `F.max_pool2d`
APPLY = "_apply"  # through which `to`, `half` and `cuda` of a module go; there is no public hook


def without_torch_function() -> Any:
    """Context in which tensors of a subclass are plain ones; torch has it for `__torch_function__` alone."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Context in which an attribute of a class or module is another one."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def before_vmap(change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Context in which `torch.vmap` maps over changed arguments; it has no hook, and drops subclasses of tensors.

    Args:
        change: Gets and returns the tuple of arguments.
    """
    process = vmap._process_batched_inputs
    return replaced(vmap, "_process_batched_inputs", lambda dims, args, *rest: process(dims, change(args), *rest))


def assert_on_device(condition: Tensor) -> None:
    """Fail if a boolean scalar is false, without waiting for a device to tell; there is no public function."""
    torch._assert_async(condition)


def outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The saved-tensor hooks (pack, unpack) that torch would ask now, for others to ask in turn; None without any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def in_backward() -> bool:
    """Whether this thread runs a backward pass, its hooks and final callbacks too; no public function tells."""
    return backward_pass() != -1


def backward_pass() -> int:
    """Number of the backward pass that this thread runs, no two have the same; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def negative_view(tensor: Tensor) -> Tensor:
    """A tensor that reads its memory negated, as imaginary parts of conjugates do; there is no public way to one."""
    return torch._neg_view(tensor)


def has_kernel(operation: str, key: str) -> bool:
    """Whether a dispatch key of an operation such as "aten::softmax.int" is taken; no public function tells."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))


def unscale(gradients: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by `inverse` in place, and set `found` to 1 if any was not finite.

    All are on one device; `found` and `inverse` are float32. In one pass, as torch's own `GradScaler` does; there is no
    public function.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)


def foreach(name: str) -> Callable[..., Any]:
    """An operation on lists of tensors, such as "add_": what torch's optimizers use, without a public name."""
    return getattr(torch, f"_foreach_{name}")


def is_flattened(parameter: Tensor) -> bool:
    """Whether `FullyShardedDataParallel` has made a parameter a piece of a flat one; no public name tells."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def before_backend(operation: Any, watch: Callable[[tuple[Any, ...]], object]) -> Callable[..., Any]:
    """A kernel for the dispatch key `BackendSelect` that shows an operation's arguments to `watch`, then goes on.

    Every call of an operation passes this key, in every thread and from C++ too, unlike a dispatch mode. The names of
    keys are not public.
    """
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        watch(args)
        return operation.redispatch(keys & below, *args, **kwargs)

    return kernel


def copied_structure(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, whose parameters, buffers and children may be replaced alone.

    `copy.copy` shares the registries, which are private; `copy.deepcopy` copies what attributes refer to. Containers
    that modules keep beside them, as `nn.LSTM` does, are copied too.
    """
    copy = object.__new__(type(module))
    vars(copy).update({k: v.copy() if isinstance(v, dict | list | set) else v for k, v in vars(module).items()})
    return copy


def private_reset(module: nn.Module) -> Callable[[], object] | None:
    """How `nn.MultiheadAttention` and `nn.Transformer` initialise themselves: they have no `reset_parameters`."""
    return getattr(module, "_reset_parameters", None)


def weights_method(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """`_init_weights(module)`, which initialises any module inside: a convention of transformers, timm and others."""
    return getattr(module, "_init_weights", None)


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Those arguments of an operation that it writes to; what its schema says has no public name."""
    given = zip(operation._schema.arguments, args, strict=False)
    named = {argument.name: argument for argument in operation._schema.arguments}
    pairs = [*given, *((named[name], value) for name, value in kwargs.items() if name in named)]
    written = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    values = [item for value in written for item in (value if isinstance(value, list | tuple) else [value])]
    return [value for value in values if isinstance(value, Tensor)]


def around_dump(trainer: Trainer, surroundings: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter a context while Lightning collects a checkpoint; again only for another context.

    Lightning asks a strategy for the model's state in the same way for a checkpoint and for anyone else.
    """
    connector = trainer._checkpoint_connector
    plain = type(connector).dump_checkpoint

    def dump_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with surroundings():
            return plain(connector, *args, **kwargs)

    vars(connector)["dump_checkpoint"] = dump_checkpoint


def around_advance(trainer: Trainer, run: Callable[[Callable[[Any], None], Any], None]) -> Callable[[], None]:
    """Let `run(advance, fetcher)` take the place of `advance(fetcher)`, with which a training loop runs one batch.

    Hooks stand within it, where others have run already; what happens between two batches has no hook of its own.

    Returns:
        Ends that, for all who have asked.
    """
    loop = trainer.fit_loop.epoch_loop
    vars(loop)["advance"] = partial(run, loop.advance)  # type: ignore[index]
    return lambda: vars(loop).pop("advance", None)  # type: ignore[attr-defined]


def logged(trainer: Trainer) -> dict[str, Metric]:
    """What a training epoch has logged so far, by hook and name, with sums over its batches; changes as it goes on."""
    results: dict[str, Metric] = trainer.fit_loop.epoch_loop._results
    return results


def forget_unscaled(precision: Precision) -> None:
    """Let a scaler forget that gradients have been unscaled, of a step that ended with neither step nor update."""
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        scaler._per_optimizer_states.clear()


def averaged_model(callback: Callback) -> nn.Module | None:
    """The average that a `WeightAveraging` keeps of the weights; its state has nothing of it."""
    return getattr(callback, "_average_model", None) if isinstance(callback, WeightAveraging) else None


def forget_saved(callback: Callback, step: int) -> None:
    """Let a `ModelCheckpoint` save at a later step than this one once more: the run has gone back behind it."""
    if isinstance(callback, ModelCheckpoint) and callback._last_global_step_saved > step:
        callback._last_global_step_saved = 0
