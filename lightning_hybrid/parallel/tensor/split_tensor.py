"""A tensor that shows the shape of a whole and holds one rank's part of it.

DTensor was considered, which does the same one level lower. Here code that nobody rewrote mixes such tensors with plain
ones (masks, positions, biases), which DTensor refuses; a part may be of three slices (a fused query, key and value
projection); an operation that needs the whole says so, where DTensor communicates silently; and parameters stay plain,
so that optimizers and `fully_shard` see nothing unusual.

Each operation of torch's Python interface is looked up by name. One without a rule gets whole tensors, gathered: right,
and slow enough for a warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_hybrid.compat import without_torch_function
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.functional.trees import leaves_of, map_leaves
from lightning_hybrid.parallel.ledgers.running import variable
from lightning_hybrid.parallel.tensor.axis import TensorAxis, count_once, gather

Rule = Callable[..., Any]
"""Answers a call: it gets the function's name, the function, positional and keyword arguments."""


def names(text: str) -> list[str]:
    """Names of functions, separated by spaces."""
    return text.split()


RULES: dict[str, Rule] = {}
VIEWS = names(
    "view reshape view_as reshape_as flatten unflatten ravel transpose swapaxes swapdims t permute movedim moveaxis "
    "squeeze unsqueeze expand expand_as broadcast_to split chunk tensor_split split_with_sizes unbind narrow select "
    "__getitem__ diagonal unfold as_strided detach alias"
)
_BY_FUNCTION: dict[Any, tuple[str, Rule | None]] = {}


class SplitTensor(Tensor):
    """One rank's part.

    Attributes:
        held: How the whole is dealt out; None for a whole parameter whose gradient is summed over the ranks later, so
            that what meets no parts makes its gradient on one rank only.
        axis: The ranks.
        parameter: The parameter that a module shows like this; None for anything else.
    """

    held: Split | None
    axis: TensorAxis
    parameter: nn.Parameter | None

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, rule = _look_up(func)
        if rule is not None and kwargs.get("out") is None:
            with without_torch_function():
                result = rule(name, func, *_as_rules_know(args, kwargs))
            if result is not NotImplemented:
                return result
        return call_whole(name, func, args, kwargs)

    @override
    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        with without_torch_function():
            return f"SplitTensor(part={Tensor.__repr__(self.as_subclass(Tensor))}, {self.held})"


class ReadOnlyCopy(Tensor):
    """What takes the place of a view that would have mixed the ranks' parts: writing into it would be lost."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = _look_up(func)[0], dict(kwargs or {})
        if any(isinstance(leaf, ReadOnlyCopy) for leaf in leaves_of(_written(name, args, kwargs))):
            raise RuntimeError(
                f"{_caller()} writes with {name} into a view of a tensor of which each rank holds a part. Write it "
                "without the in-place operation, or give the module the style 'replicated' in tensor_parallel_plan."
            )
        args, kwargs = map_leaves(_plain, (args, kwargs))
        return func(*args, **kwargs)


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, ReadOnlyCopy):
        return leaf
    with without_torch_function():
        return leaf.as_subclass(Tensor)


def rules(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions of these names."""

    def register(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
        return rule

    return register


def wrap(part: Any, split: Split | None, axis: TensorAxis) -> SplitTensor:
    """Show a part as the whole."""
    with without_torch_function():
        result = part.as_subclass(SplitTensor)
    result.held, result.axis, result.parameter = split, axis, None
    return result


def part_of(tensor: Tensor) -> Tensor:
    """The part as a plain tensor; a plain tensor as it is."""
    if not isinstance(tensor, SplitTensor):
        return tensor
    with without_torch_function():
        return tensor.as_subclass(Tensor)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The whole's shape."""
    with without_torch_function():
        local = tuple(tensor.shape)
    return tensor.held.whole_shape(local) if isinstance(tensor, SplitTensor) and tensor.held else local


def split_of(value: Any) -> Split | None:
    """The split of a part; None for anything else."""
    return value.held if isinstance(value, SplitTensor) else None


def axis_of(tree: Any) -> TensorAxis:
    """The axis of the first split tensor among arguments."""
    return next(leaf.axis for leaf in leaves_of(tree) if isinstance(leaf, SplitTensor))


def whole(value: Any) -> Any:
    """A split tensor made whole, with the collective that takes; anything else as it is."""
    if not isinstance(value, SplitTensor):
        return value
    if value.held is None:
        with without_torch_function():
            return count_once(part_of(value), value.axis)
    with without_torch_function():
        return gather(part_of(value), value.held, value.axis)


def call_whole(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on whole tensors.

    Raises:
        RuntimeError: If it would write into a split tensor, or reads an address.
    """
    if name == "data_ptr":
        raise RuntimeError(
            "A custom kernel asks for the address of a tensor of which this rank holds a part only. Give the modules "
            "around it the style 'replicated' in tensor_parallel_plan."
        )
    written = [leaf for leaf in leaves_of(_written(name, args, kwargs)) if isinstance(leaf, SplitTensor)]
    if written:
        raise RuntimeError(
            f"{_caller()} writes with {name} into a tensor of shape {list(shape_of(written[0]))} of which "
            "each rank holds a part, in a way that has no rule for parts. Write it without the in-place operation, or "
            "give the module the style 'replicated' in tensor_parallel_plan."
        )
    if any(split_of(leaf) for leaf in leaves_of((args, kwargs))):
        warn_of_gather(name, args, kwargs)
    elif _stays_deferred(name, (args, kwargs)):
        axis, (args, kwargs) = axis_of((args, kwargs)), map_leaves(part_of, (args, kwargs))
        return map_leaves(lambda leaf: _deferred(leaf, axis), func(*args, **kwargs))
    args, kwargs = map_leaves(whole, (args, kwargs))
    result = func(*args, **kwargs)
    return map_leaves(_read_only, result) if name in VIEWS else result


def _read_only(leaf: Any) -> Any:
    return leaf.as_subclass(ReadOnlyCopy) if isinstance(leaf, Tensor) else leaf


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function writes into."""
    return (args[0] if args and _writes(name) else None, kwargs.get("out"))


def _stays_deferred(name: str, arguments: Any) -> bool:
    """Whether a function makes something of deferred parameters alone, such as `1 + weight`: so is its gradient."""
    tensors = [leaf for leaf in leaves_of(arguments) if isinstance(leaf, Tensor)]
    return name != "backward" and not any(_needs_whole_gradient(t) for t in tensors)


def _needs_whole_gradient(tensor: Tensor) -> bool:
    return not isinstance(tensor, SplitTensor) and tensor.requires_grad


def _deferred(leaf: Any, axis: TensorAxis) -> Any:
    return wrap(leaf, None, axis) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _writes(name: str) -> bool:
    return (
        name == "__setitem__"
        or name.startswith("set ")
        or (name.endswith("_") and not name.endswith("__"))
        or _is_in_place_operator(name)
    )


def _is_in_place_operator(name: str) -> bool:
    return name.startswith("__i") and name.strip("_") in {
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul",
    }  # fmt: skip


def _as_rules_know(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first argument by position, and torch's names for those that it also takes by NumPy's."""
    if not kwargs:
        return args, kwargs
    kwargs = {_NAMES_OF_NUMPY.get(key, key): value for key, value in kwargs.items()}
    first = next((key for key in ("condition", "tensors", "input") if key in kwargs), None) if not args else None
    return (args, kwargs) if first is None else ((kwargs.pop(first),), kwargs)


_NAMES_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


def _look_up(func: Any) -> tuple[str, Rule | None]:
    if func not in _BY_FUNCTION:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = f"{name.strip('_')} {getattr(func.__self__, '__name__', '')}"
        ours = (getattr(func, "__module__", None) or "torch").startswith("torch")
        _BY_FUNCTION[func] = name, RULES.get(name) if ours else None
    return _BY_FUNCTION[func]


_warned = set[tuple[str, str]]()


def warn_of_gather(name: str, args: Any, kwargs: Any) -> None:
    """Say once where what is gathered, on the first rank of the axis: all gather alike."""
    caller, file, line = _place()
    if (caller, name) in _warned or axis_of((args, kwargs)).rank:
        return
    _warned.add((caller, name))
    gathered = [leaf for leaf in leaves_of((args, kwargs)) if split_of(leaf)]
    shapes = ", ".join(f"{list(shape_of(leaf))} split on dimension {leaf.held.dim}" for leaf in gathered)
    warnings.warn_explicit(
        f"{caller} calls {name} on {shapes}, which each rank holds a part of. It has no rule for parts, so the whole "
        "is gathered at each call: right, but slow. Give the modules around it the style 'replicated' in "
        "tensor_parallel_plan if it is called often.",
        UserWarning,
        file,
        line,
    )


def _caller() -> str:
    return _place()[0]


def _place() -> tuple[str, str, int]:
    """The innermost module of the user's whose forward is under way, and the file and line that it is at."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = variable(frame, "self")
        if isinstance(owner, nn.Module) and frame.f_code.co_name not in ("_call_impl", "_wrapped_call_impl", "call"):
            return type(owner).__name__, frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "The step", __file__, 1
