"""Blocks whose parameters are in memory only while the blocks run: a model that fits on no rank, before it is sharded.

What is sharded together is known after the first probe, and the probe runs the model. So until then each call of a
block makes its parameters, which costs the time of an initialisation, and lets go of them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_hybrid.compat import storage_key
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.data_parallel import Replicated
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.meta.materialising import Materialiser, assign, get
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.probe_run import uncompiled
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.tensor.split_tensor import part_of
from lightning_hybrid.parallel.zero.reads import METADATA


@dataclass(frozen=True)
class _Recipe:
    """What autograd keeps of a parameter that is made again if a backward pass asks for it."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Streaming:
    """The blocks of one rank, as long as they are streamed.

    Args:
        materialiser: Makes their parameters.
        blocks: Names of blocks.

    Attributes:
        names: Names of the parameters that are streamed.
        present: Those that are in memory, by `storage_key`.
        absent: Those that are not, by that of the tensors that stand for them, or have been them in this step.
    """

    def __init__(self, materialiser: Materialiser, blocks: Sequence[str]) -> None:
        self.materialiser, self._root = materialiser, materialiser.root
        self._names = materialiser.lonely(blocks)
        self.names = {name for names in self._names.values() for name in names}
        self._idle = {name: get(self._root, name) for name in self.names}
        self.absent = {storage_key(tensor): name for name, tensor in self._idle.items()}
        self.present: dict[int, str] = {}
        self._gone: dict[int, Any] = {}  # kept, so that no other memory gets their identities
        self._depth: Counter[str] = Counter()
        self._hooks: list[Any] = []
        for name in self._names:
            block = self._root.get_submodule(name)
            self._hooks.append(block.register_forward_pre_hook(partial(self._fill, name), prepend=True))
            self._hooks.append(block.register_forward_hook(partial(self._drop, name), always_call=True))

    @property
    def active(self) -> bool:
        """Whether parameters are still streamed."""
        return bool(self._hooks)

    @property
    def device(self) -> torch.device:
        """Where parameters are while they are there."""
        return self.materialiser.device

    def stop(self) -> None:
        """Leave all parameters on the meta device."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self) -> None:
        """Make all parameters, for good."""
        self.stop()
        self.materialiser.fill()

    def forget(self) -> None:
        """After a step nothing of it is left that could be read."""
        for key in self._gone:
            del self.absent[key]
        self._gone.clear()

    def pack(self, tensor: Tensor) -> Tensor | _Recipe:
        """What autograd saves for a backward pass, which a probe or an evaluation hardly ever has."""
        name = self.present.get(storage_key(tensor)) if tensor.layout is torch.strided else None
        if name is None:
            return tensor
        return _Recipe(name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _Recipe) -> Tensor:
        """What was saved."""
        if isinstance(saved, Tensor):
            return saved
        parameter = self.materialiser.make([saved.name])[saved.name]
        return parameter.detach().as_strided(saved.size, saved.stride, saved.offset)

    def _fill(self, block: str, *_: Any) -> None:
        self._depth[block] += 1
        if self._depth[block] == 1:
            for name, parameter in self.materialiser.make(self._names[block]).items():
                self.present[storage_key(parameter)] = name
                assign(self._root, name, parameter)

    def _drop(self, block: str, *_: Any) -> None:
        self._depth[block] -= 1
        if self._depth[block]:
            return
        for name in self._names[block]:
            parameter = get(self._root, name)
            assign(self._root, name, self._idle[name])
            key, storage = storage_key(parameter), parameter.untyped_storage()
            if self.present.pop(key, None) is not None:
                storage.resize_(0)  # autograd's graph refers to it
                self.absent[key], self._gone[key] = name, storage


class _Reads(TorchFunctionMode):
    """Context that refuses functions of parameters that are not there."""

    def __init__(self, streaming: Streaming) -> None:
        super().__init__()
        self._streaming = streaming

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == torch.Tensor.device.__get__ and storage_key(part_of(args[0])) in self._streaming.absent:
            return self._streaming.device
        if getattr(func, "__name__", "") not in METADATA:
            for leaf in leaves_of((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._check(part_of(leaf))
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: Tensor) -> None:
        name = self._streaming.absent.get(storage_key(tensor)) if tensor.layout is torch.strided else None
        if name is not None:
            raise RuntimeError(
                f"{name} is read while its block does not run. The model was built on the meta device, and until the "
                "first step is known its blocks have parameters only while they run. Read it in the block's forward, "
                "set zero_stage to 2 or less, or build the model on the CPU."
            )


class Streamed(Replicated):
    """Plain replication before the model is sharded, with blocks that are streamed."""

    def __init__(
        self,
        cut: StageCut | None,
        root: nn.Module,
        mesh: Mesh,
        streaming: Streaming,
        *,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(cut, root, mesh, reduce_dtype=reduce_dtype)
        self._streaming = streaming

    @override
    def step(self, function: Callable[[], Result]) -> Result:
        streaming = self._streaming
        if not streaming.active:
            return super().step(function)
        saved = torch.autograd.graph.saved_tensors_hooks(streaming.pack, streaming.unpack)
        try:
            with uncompiled(), saved, _Reads(streaming):
                return super().step(function)
        finally:
            streaming.forget()
