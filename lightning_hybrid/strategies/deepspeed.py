"""DeepSpeed's ZeRO on CPUs: Lightning's own strategy takes GPUs only. `deepspeed` is imported where it is asked for."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from typing_extensions import override

KERNEL = "deepspeed_shm_comm"  # collectives in shared memory, which DeepSpeed would compile when ranks meet


class HybridDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's `DeepSpeedStrategy` for processes without GPU, over gloo; nothing is compiled at run time.

    It trains by DeepSpeed, and not by this package: to compare with it. Gradients are clipped if
    `Trainer(gradient_clip_val=...)` or the `config` says so; DeepSpeed alone would clip them to a norm of 1.

    Args:
        kwargs: Those of `DeepSpeedStrategy`, such as `stage` or `config`.

    Raises:
        ImportError: If `deepspeed` is not installed.
    """

    strategy_name = "hybrid_deepspeed_cpu"

    def __init__(self, **kwargs: Any) -> None:
        if find_spec("deepspeed") is None:
            raise ImportError(
                f"{self.strategy_name!r} trains by DeepSpeed, which is not installed. Install it after torch, which it "
                "must not replace: pip install deepspeed"
            )
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported, where a GPU may be
        super().__init__(**kwargs)

    @property
    @override
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed compares its index with numbers

    @override
    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            raise ValueError(
                f"{self.strategy_name!r} is for Trainer(accelerator='cpu'), and runs on "
                f"{type(self.accelerator).__name__}. On GPUs take strategy='deepspeed'."
            )
        DDPStrategy.setup_environment(self)  # not DeepSpeedStrategy's, which refuses a CPU

    @override
    def setup_distributed(self) -> None:
        import deepspeed

        device = deepspeed.get_accelerator().device_name()
        if device != "cpu":
            raise RuntimeError(f"DeepSpeed runs on {device!r} here. Set the environment variable DS_ACCELERATOR=cpu.")
        deepspeed.ops.__compatible_ops__[KERNEL] = False
        os.environ["LOCAL_SIZE"] = str(self.num_processes)  # its number of devices
        self.parallel_devices = [torch.device("cpu", index) for index in range(self.num_processes)]
        super().setup_distributed()
