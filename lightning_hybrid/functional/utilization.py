"""How much of what devices could compute a model has asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def model_flops_utilization(
    flops: float, *, count: float, seconds: float, num_devices: int, peak_flops: float
) -> float:
    """Give model FLOPs over those that all devices could have done in the same time.

    Args:
        flops: Of forward and backward for one sample or token, without recomputation.
        count: Samples or tokens of all replicas, each once.
        seconds: Time they took.
        num_devices: Devices that worked on them, on all axes.
        peak_flops: Of one device, in FLOP/s.

    Returns:
        A share of 1; NaN without time.

    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B.
    """
    return flops * count / (seconds * num_devices * peak_flops) if seconds else float("nan")


def beyond_peak(flops: float, peak_flops: float) -> str:
    """What a share above 1 says of the numbers that were given; the same for each step, so that it is warned of once.

    Args:
        flops: For one sample or token.
        peak_flops: Of one device, in FLOP/s.
    """
    return (
        f"The model is said to do more FLOPs than its devices can: {flops:.4g} for one sample or token, with "
        f"peak_flops={peak_flops:.4g}. Give the peak of one device in FLOP/s, such as 989e12 and not 989, and FLOPs of "
        "one sample, or one token, and not of a batch."
    )


def training_flops(module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> int:
    """Count the FLOPs of matrix products in forward and backward, on the meta device: nothing is computed.

    Backward counts twice as much as forward, so that what is recomputed does not count. `FlopCounterMode` of torch
    counts; Lightning's `measure_flops` is the same around a backward pass as it would run.

    Args:
        module: The whole model.
        args: Of its `forward`; tensors of any device.
        kwargs: Likewise.

    Returns:
        For all samples of the arguments; a multiply-add is two.

    Raises:
        RuntimeError: If `forward` needs values, or tensors that are neither parameters nor buffers.

    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B: 6 FLOPs a parameter and token, 2 of them forward.
    """
    tensors = {name: _on_meta(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    given = tuple(_on_meta(arg) for arg in args), {name: _on_meta(arg) for name, arg in (kwargs or {}).items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(module, tensors, *given)
    return 3 * int(counter.get_total_flops())


def _on_meta(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, Tensor) else value
