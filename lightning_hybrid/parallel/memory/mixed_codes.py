"""What saved storages would take if they were compressed, found out while a policy measures.

What outer hooks get is really compressed, once nobody but graphs holds it. What recomputed blocks save is dropped, and
encoded for a trial when the block ends.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.compat import num_holders, storage_key, version
from lightning_hybrid.parallel.memory.compressed import Compressed
from lightning_hybrid.parallel.memory.compression import Compression
from lightning_hybrid.parallel.memory.encoding import Encoded, encode
from lightning_hybrid.parallel.memory.keys import Met, SavedKeys
from lightning_hybrid.parallel.memory.offload_copies import Geometry
from lightning_hybrid.parallel.memory.savers import Saver
from lightning_hybrid.parallel.memory.storages import ALONE

SPARE = 16
"""Sparse codes change in size from step to step: a plan counts on one part in so many more than the most seen."""


class Code(NamedTuple):
    """What compression makes of a storage.

    Attributes:
        num_bytes: Bytes that are kept, at most.
        seconds: Time to encode and decode it.
    """

    num_bytes: int
    seconds: float

    @classmethod
    def of(cls, encoded: Encoded, seconds: float = 0.0) -> Code:
        """That of what has been encoded."""
        return cls(encoded.num_bytes + ("sparse" in encoded.code) * (encoded.num_bytes // SPARE), seconds)


@dataclass
class Codes:
    """What is known of one storage.

    Attributes:
        savers: Operations of recomputed blocks that save it.
        trial: What it takes if these are all who save it.
        is_held: Whether somebody but graphs held it when the block ended.
        real: What it has taken as what outer hooks got.
        group: Where the step was when that was encoded.
    """

    savers: list[tuple[Saver, Geometry]] = field(default_factory=list)
    trial: Code | None = None
    is_held: bool = False
    real: Code | None = None
    group: str = ""
    is_left: bool = False
    _version: int = 0

    def together(self, *, is_lossy: bool) -> Code | None:
        """At most what it takes if both savers of blocks and outer hooks' keep it; each may need numbers in its form.

        Without lossy formats they share the larger code, as all others are read from compressed rows too.
        """
        if not self.savers or self.real is None or self.trial is None:
            return None if self.savers else self.real
        sizes = self.real.num_bytes, self.trial.num_bytes
        seconds = self.real.seconds, self.trial.seconds
        return Code(sum(sizes), sum(seconds)) if is_lossy else Code(max(sizes), max(seconds))

    def either(self) -> Code | None:
        """At most what it takes if either keeps it."""
        return self.together(is_lossy=False)


class CodeMeter:
    """Finds out what codes take.

    Args:
        compression: Compresses what outer hooks get.
        keys: Tells storages apart.
        device: Waited for around what is timed.
    """

    def __init__(self, compression: Compression, keys: SavedKeys, device: torch.device) -> None:
        self._compression, self._keys, self._device = compression, keys, device
        self._of_pass: dict[int, Codes] = {}
        self._taken: dict[int, Codes] = {}
        self._tried: dict[int, tuple[Codes, Tensor]] = {}
        compression.chooses, compression.settled = self._take, self._settled

    def codes(self, met: Met) -> Codes:
        """Of a storage of the pass."""
        return self._of_pass.setdefault(id(met), Codes())

    def end_pass(self) -> None:
        """All storages are those of another pass."""
        self._of_pass.clear()

    def note(self, tensor: Tensor, met: Met) -> None:
        """A recomputed block saves a tensor: try it at the block's end."""
        codes, saver = self.codes(met), self._compression.saver(tensor)
        if not codes.savers:
            codes.is_left, codes._version = not self._compression.is_worthwhile(tensor, saver), version(tensor)
        codes.is_left |= codes._version != version(tensor)
        codes.savers.append((saver, Geometry.of(tensor)))
        self._tried.setdefault(id(met), (codes, tensor.detach()))

    def end_block(self) -> None:
        """Encode what the block has saved, and let go of it."""
        for codes, tensor in self._tried.values():
            is_same, codes.trial = codes._version == version(tensor) and not codes.is_left, None
            codes.is_held = num_holders(tensor) > ALONE
            if is_same:
                codes.trial = self._timed(tensor.untyped_storage(), codes.savers)
        self._tried.clear()

    def _take(self, tensor: Tensor) -> bool:
        met = self._keys.find(tensor)
        if met is not None:
            self._taken[storage_key(tensor)] = self.codes(met)
        return True

    def _settled(self, stored: Compressed) -> None:
        codes = self._taken.pop(stored.key, None)
        if codes is None or stored.encoded is None:
            return
        codes.group, codes.real = self._keys.group, Code.of(stored.encoded)
        flat = next((decoder() for decoder in stored.encoded.decoders.values()), None)
        if flat is not None:  # what is read of it is encoded again
            again = self._timed(flat.untyped_storage(), stored.savers)
            codes.real = codes.real._replace(seconds=0.0 if again is None else again.seconds)

    def _timed(self, storage: torch.UntypedStorage, savers: Collection[tuple[Saver, Geometry]]) -> Code | None:
        """Encode a storage, and decode it for all who read it."""
        start = self._now()
        encoded = encode(storage, savers, self._compression.codec)
        if encoded is None:
            return None
        for decoder in dict.fromkeys(encoded.decoders.values()):
            decoder()
        return Code.of(encoded, self._now() - start)

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()
