"""What a split tensor answers about itself: the geometry of the whole, and everything else of its part."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.parallel.tensor.split_tensor import names, part_of, rules, shape_of, split_of, wrap

ATTRIBUTES = names(
    "dtype device requires_grad grad_fn is_leaf layout is_sparse is_sparse_csr is_nested is_quantized "
    "is_cuda is_cpu is_meta is_xpu is_mps is_mkldnn is_ipu is_xla is_maia is_vulkan is_mtia itemsize output_nr "
    "retains_grad names _version _base _backward_hooks _grad _cdata _grad_fn"
)
METHODS = names(
    "is_floating_point is_complex is_signed is_conj is_neg is_inference is_pinned is_shared element_size "
    "get_device register_post_accumulate_grad_hook retain_grad untyped_storage __hash__ "
    "_is_view is_same_size is_contiguous is_coalesced storage_offset new_zeros new_ones new_empty new_full "
    "new_tensor is_tensor has_names is_nonzero_static dense_dim"
)


@rules(*(f"get {name}" for name in ATTRIBUTES), *METHODS, "__format__")
def _ask_part(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


@rules("get grad", "set grad", "set requires_grad", "requires_grad_")
def _ask_parameter(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a parameter that a module shows, what autograd keeps with the parameter itself."""
    tensor = args[0]
    if name == "get grad":
        gradient = tensor.parameter.grad if tensor.parameter is not None else func(tensor)
        return wrap(gradient, tensor.held, tensor.axis) if gradient is not None and tensor.held else gradient
    value = args[1:] if name != "set grad" or args[1] is None else (part_of(args[1]),)
    func(tensor if tensor.parameter is None else tensor.parameter, *value, **kwargs)
    return tensor if name == "requires_grad_" else None


@rules("register_hook")
def _watch_gradient(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook sees the gradient of the whole, of which this rank has a part."""
    tensor, hook = args[0], kwargs.get("hook", args[-1])
    held, axis = tensor.held, tensor.axis

    def watch(gradient: Tensor) -> Any:
        result = hook(wrap(gradient, held, axis))
        if split_of(result) or result is None:
            return None if result is None else part_of(result)
        return part_of(result) if held is None else axis.part(result, held)

    return func(tensor, watch)


@rules("type")
def _convert(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    return wrap(result, args[0].held, args[0].axis) if isinstance(result, Tensor) else result


@rules("get shape", "size", "dim", "ndimension", "get ndim", "numel", "nelement", "__len__", "stride", "sym_size")
def _ask_whole(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = torch.Size(shape_of(args[0]))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if name in ("get shape", "size", "sym_size"):
        return shape if dim is None else shape[dim]
    if name in ("dim", "ndimension", "get ndim"):
        return len(shape)
    if name == "stride":
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return strides if dim is None else strides[dim]
    return shape[0] if name == "__len__" else shape.numel()
