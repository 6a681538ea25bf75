"""Random numbers under a pipeline: what a step draws depends on the step, micro-batch and replica, not on the stage."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy
import torch

from lightning_hybrid.parallel.pipeline.gates import fork_random_streams, seed_random_streams


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Streams:
    """Context around a step: `seed` starts the streams anew, and at its end the user's own are as before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Streams:
        self._torch = fork_random_streams(self._device)
        self._torch.__enter__()
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._torch.__exit__(kind, error, traceback)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)

    def seed(self, *parts: object) -> None:
        """Start torch's, Python's and NumPy's streams from a seed derived from `parts`."""
        seed = derived_seed(*parts)
        seed_random_streams(seed, self._device)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of this process's random streams: torch's, the device's, Python's and NumPy's, as tensors and numbers."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    version, numbers, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": (version, list(numbers), gauss),
        "numpy": (str(kind), torch.tensor(list(map(int, keys))), int(position), int(has_gauss), float(cached)),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on from what `random_state` returned; a device that had no stream then keeps its own."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
