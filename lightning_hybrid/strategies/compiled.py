"""What torch.compile may be used on: modules that run on one stage, in place, so that names stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_hybrid.compat import OptimizedModule, is_compiled, is_compiled_function
from lightning_hybrid.parallel.pipeline.cut import ancestors_of

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_compiled(module: nn.Module, blocks: Sequence[str], *, pipeline: int, tensor: int = 1) -> None:
    """Refuse what compiles code that several stages run a part of, or that slices run, or changes parameters' names.

    Args:
        module: The whole module.
        blocks: Names of its blocks.
        pipeline: Ranks of the pipeline; without one only names matter.
        tensor: Ranks of the tensor axis.

    Raises:
        RuntimeError: Naming the module, and what to compile instead.
    """
    for name, child in module.named_modules():
        if isinstance(child, OptimizedModule) and tensor > 1:
            raise _knows_no_slices(name, tensor)
        if isinstance(child, OptimizedModule):
            raise RuntimeError(
                f"{name} is the result of torch.compile, which would put _orig_mod into the names of parameters, so "
                f"that checkpoints do not fit the plain model. Keep the module and call its compile() instead: "
                f"self.{name}.compile()."
            )
    if tensor > 1:
        _refuse_all_compiled(module, tensor)
    if pipeline == 1:
        return
    for name in sorted(ancestors_of(blocks)):
        ancestor = module.get_submodule(name)
        functions = ["forward", *STEPS] if not name else ["forward"]
        compiled = [f for f in functions if is_compiled_function(getattr(ancestor, f, None))]
        if compiled or is_compiled(ancestor):
            what = f"{name or type(module).__name__}{f'.{compiled[0]}' if compiled else ''}"
            raise RuntimeError(
                f"{what} is compiled and runs {blocks[0]} to {blocks[-1]}, which are on several pipeline stages; "
                "compiled code would run past the boundaries. Compile each block on its own instead, block.compile(), "
                "and modules outside the blocks if you like."
            )


def _refuse_all_compiled(module: nn.Module, tensor: int) -> None:
    for name, child in module.named_modules():
        functions = ["forward", *STEPS] if not name else ["forward"]
        compiled = [f for f in functions if is_compiled_function(getattr(child, f, None))]
        if compiled or is_compiled(child):
            raise _knows_no_slices(f"{name or type(module).__name__}{f'.{compiled[0]}' if compiled else ''}", tensor)


def _knows_no_slices(what: str, tensor: int) -> RuntimeError:
    return RuntimeError(
        f"{what} is compiled and tensor_parallel_size={tensor} shows it slices of its matrices, which compiled "
        "code does not know of yet. Do not compile it, or set tensor_parallel_size=1."
    )
