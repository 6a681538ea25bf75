"""Saved activations in fewer bytes until their backward pass needs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Table
from typing_extensions import override

from lightning_hybrid.callbacks.activation_offload import ActivationOffload
from lightning_hybrid.callbacks.arguments import check_flag, check_whole
from lightning_hybrid.callbacks.memory_policy import MemoryTechnique
from lightning_hybrid.callbacks.pictures import Picture, picture_path, write_picture
from lightning_hybrid.callbacks.reports import show
from lightning_hybrid.functional.compressing import (
    COMPRESSION_COLUMNS,
    RAW,
    LayerBytes,
    compression_rows,
    group_layers,
)
from lightning_hybrid.functional.compression_drawing import compression_png
from lightning_hybrid.parallel.memory.compression import Compression
from lightning_hybrid.parallel.memory.encoding import LOSSY, Codec, Lossy

MIN_BYTES = 2**10
FILE = "compression.png"


class ActivationCompression(MemoryTechnique):
    """Encodes what autograd saves, between its last use in the forward pass and its backward; with any strategy.

    Losslessly, with gradients bitwise those without it:

    - The result of a ReLU that nobody but itself and a max-pool has saved becomes one bit an element, the pool's
      indices the place in the window (half a byte for windows of up to 16 elements), and the pool's input its shape.
    - What has many zeros, as the input of a convolution or a linear layer behind a ReLU, becomes compressed rows of
      256 elements with a byte a column, where that is smaller. For backward it is dense again.
    - Boolean masks become bits.

    With `lossy` other floating tensors, and the numbers of compressed rows, are rounded to 16, 10 or 8 bits. The
    forward pass is bitwise the same, and a number that the backward pass reads is off by at most
    `functional.codecs.ERROR_BOUNDS`. A ReLU's own gradient stays exact, as its signs are kept. Exact stays, too, what
    losses save and what a forward is repeated from, and a tensor with a number beyond the largest of the format.

    Args:
        lossless: Whether to do the first.
        lossy: "fp16", "fp10" (1 sign, 5 exponent and 4 mantissa bits, three to 32 bits) or "fp8" (1-4-3); or None.
        budget_bytes: Most bytes that a rank may hold for backward, of all micro-batches in flight. Two steps compress
            all that they can, and measure; then the plan that keeps to the budget and takes the least time is printed,
            one for all of recomputation, offloading and compression that are in the Trainer. None compresses always.
        blocks: Dotted names of the lists whose elements are the blocks of that plan; None finds them.
        min_bytes: Storages with fewer bytes stay.
        picture: Where to draw bytes before and after by layer at the end of `fit`: a path that ends in ".png" or is a
            folder; True for `compression.png` in the logger's folder, or without a logger in `default_root_dir`.

    Attributes:
        layers: Of this rank's last batch, bytes before and after by module, in the order in which modules save.

    Raises:
        ValueError: If nothing is to be done, or before training for what cannot work.

    Source: Jain et al. 2018, Gist: Efficient Data Encoding for Deep Neural Network Training (ISCA), section IV.
    """

    plans_alone = False

    def __init__(
        self,
        lossless: bool = True,
        lossy: Lossy | None = None,
        budget_bytes: int | None = None,
        blocks: str | Sequence[str] | None = None,
        min_bytes: int = MIN_BYTES,
        picture: Picture = False,
    ) -> None:
        check_flag("lossless", lossless)
        if lossy is not None and lossy not in LOSSY:
            raise ValueError(f"lossy={lossy!r} is none of {list(LOSSY)}. Choose one, or None.")
        if not lossless and lossy is None:
            raise ValueError(
                "lossless=False and lossy=None leave nothing to do. Choose lossy, or leave the callback out."
            )
        check_whole("min_bytes", min_bytes, 0, " of bytes")
        if budget_bytes is not None:
            check_whole("budget_bytes", budget_bytes, 1, " of bytes")
        self.budget_bytes, self.blocks = budget_bytes, blocks
        self.lossless, self.lossy, self.min_bytes = lossless, lossy, min_bytes
        picture_path(picture, FILE)
        self.picture, self._path = picture, ""
        self.layers: dict[str, LayerBytes] = {}
        self._compression: Compression | None = None
        self._has_warned = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        number = sum(isinstance(callback, ActivationCompression) for callback in callbacks)
        if number > 1:
            raise ValueError(
                f"The Trainer has {number} ActivationCompressions, and a tensor is compressed once. Keep one."
            )
        if getattr(trainer.strategy, "zero_stage_3", False):
            raise ValueError(
                f"ActivationCompression cannot tell parameters from activations under stage 3 of "
                f"{type(trainer.strategy).__name__}, which swaps their memory. Use hybrid_zero3, or stage 2."
            )
        # the hooks that are entered last are asked first: compression, which leaves offloading the rest
        offloads = [callback for callback in callbacks if isinstance(callback, ActivationOffload)]
        if offloads and callbacks.index(offloads[0]) > callbacks.index(self):
            others = [callback for callback in callbacks if callback is not self]
            others.insert(others.index(offloads[0]) + 1, self)
            trainer.callbacks = others  # type: ignore[attr-defined]
        super().setup(trainer, pl_module, stage)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._path = picture_path(self.picture, FILE, trainer)
        self.layers, self._has_warned = {}, False
        codec = Codec(self.lossless, self.lossy)
        self._compression = Compression(pl_module, trainer.strategy.root_device, codec, self.min_bytes)
        super().on_fit_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._compression is not None
        self._compression.start()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._compression is not None
        self._compression.stop()
        self.layers = self._compression.layers
        has_codes = any(set(layer.after) - {RAW} for layer in self.layers.values())
        if self.joint is None and not has_codes and not self._has_warned:
            self._has_warned = True
            before = sum(layer.before for layer in self.layers.values())
            rank_zero_warn(
                f"ActivationCompression compresses nothing: of {before:,} bytes that the first batch saved, nothing of "
                f"min_bytes={self.min_bytes} or more would be smaller with lossless={self.lossless}, "
                f"lossy={self.lossy!r}. Set lossy, or leave the callback out."
            )
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._compression is not None
        self._compression.stop()  # a hook may have skipped the rest of the epoch in the middle of a batch
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def leave_batch(self, trainer: Trainer) -> None:
        assert self._compression is not None
        self._compression.stop()
        super().leave_batch(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        self._close()
        show(trainer, self.table())
        self._draw(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._close()
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if self._path and trainer.is_global_zero and self.layers:
            draw = partial(compression_png, self.layers, title=f"saved activations of step {trainer.global_step}")
            write_picture(self._path, draw, type(self).__name__)

    @property
    @override
    def runtime(self) -> Compression:
        assert self._compression is not None
        return self._compression

    def table(self) -> Table:
        """Bytes of the last batch on this rank before and after, by layer."""
        table = Table(title="Saved activations of this rank's last batch")
        for index, column in enumerate(COMPRESSION_COLUMNS):
            table.add_column(column, justify="left" if index in (0, 4) else "right")
        for row in compression_rows(group_layers(self.layers)):
            table.add_row(*row)
        return table

    def _close(self) -> None:
        if self._compression is not None:
            self._compression.close()
            self._compression = None
