"""A file of torch.save whose tensors are written afterwards.

Such a file is a zip archive without compression, with the pickled structure in `data.pkl` and the bytes of storage N in
`data/N`. `torch.serialization.skip_data` leaves room for those, and writes checksums of 0, which are set right here:
torch reads past them, but `zipfile`, `unzip` and `lightning-hybrid checkpoint verify` do not.
"""

from __future__ import annotations

import os
import pickle
import struct
import types
import zipfile
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.compat import FakeTensorMode, untyped
from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.hollow import Hole, Hollow, write_at

# PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7 (local file header), 4.3.9 (data descriptor), 4.3.12 (central directory)
LOCAL, DESCRIPTOR, CENTRAL = b"PK\3\4", b"PK\7\x08", b"PK\1\2"
LOCAL_SIZE, CENTRAL_SIZE = 30, 46


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without memory that stands in a checkpoint for one that is written later."""
    with _no_memory():
        return torch.empty(shape, dtype=dtype)


@cache
def _no_memory() -> FakeTensorMode:
    return FakeTensorMode()


class HollowCheckpoint(Hollow):
    """One file as torch.save writes it, from a checkpoint with placeholders in it.

    Args:
        path: The file's.
        checkpoint: Anything that torch.save takes. Other tensors than placeholders are written at once. A placeholder
            that stands in several places is one tensor there, as tied weights are.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> None:
        super().__init__(path)
        try:
            self._storages = save_without_elements(checkpoint, self.file)  # kept: holes go by their identity
            found = records(self.file)
            self._records: dict[Hashable, Record] = {
                id(storage): found[number] for number, storage in self._storages.items()
            }
            self.holes = {key: Hole(record.offset, record.nbytes) for key, record in self._records.items()}
            for storage in self._storages.values():
                if storage.device.type != "meta":
                    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                    self.fill(id(storage), data.shape, Box.of(data.shape), data)
        except BaseException:
            self.discard()
            raise

    def write(self, place: Tensor, box: Box, data: Tensor) -> None:
        """Write a part of a tensor.

        Args:
            place: The placeholder that stands for it.
            box: Which part.
            data: Its elements, on any device, of the box's sizes.

        Raises:
            OSError: If the disk is full.
            TypeError: If the elements are of another type.
        """
        if data.dtype != place.dtype:
            raise TypeError(f"A part of a tensor of {place.dtype} is of {data.dtype}.")
        self.fill(id(place.untyped_storage()), place.shape, box, data)

    @override
    def seal(self) -> None:
        for key, hole in self.holes.items():
            for offset in self._records[key].checksums:
                write_at(self.file.fileno(), offset, memoryview(struct.pack("<I", self.checksum(hole))))


def save_without_elements(checkpoint: Any, file: BinaryIO) -> dict[str, torch.UntypedStorage]:
    """Write everything but the elements of tensors.

    Args:
        checkpoint: Anything that torch.save takes.
        file: An empty one on the disk.

    Returns:
        The storages by their numbers in the file.
    """
    storages: dict[str, torch.UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        """Notes which storage gets which number; torch.save numbers them in a subclass that it makes of this."""

        def __init_subclass__(cls) -> None:
            number = cls.persistent_id

            def noting(self: pickle.Pickler, value: Any) -> Any:
                found = number(self, value)
                if found is not None:
                    storages[found[2]] = untyped(value)
                return found

            cls.persistent_id = noting  # type: ignore[method-assign]

    module = types.SimpleNamespace(**{**vars(pickle), "Pickler": Pickler})
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(checkpoint, file, pickle_module=module)
    file.flush()
    return storages


class Record(NamedTuple):
    """A storage in the archive: first byte, length, and where its checksum is written."""

    offset: int
    nbytes: int
    checksums: tuple[int, ...]


def records(file: BinaryIO) -> dict[str, Record]:
    """The archive's storages by their numbers."""
    handle, found = file.fileno(), {}
    with zipfile.ZipFile(file) as archive:
        entry, names = archive.start_dir, archive.infolist()
    for record in names:
        head = os.pread(handle, CENTRAL_SIZE, entry)
        local = os.pread(handle, LOCAL_SIZE, record.header_offset)
        assert head.startswith(CENTRAL), f"no entry of the zip archive at byte {entry}"
        assert local.startswith(LOCAL), f"no record of the zip archive at byte {record.header_offset}"
        offset = record.header_offset + LOCAL_SIZE + sum(struct.unpack("<HH", local[26:30]))  # name, extra fields
        checksums = [entry + 16]
        entry += CENTRAL_SIZE + sum(struct.unpack("<HHH", head[28:34]))
        end = offset + record.file_size
        if os.pread(handle, 4, end) == DESCRIPTOR:  # all have one, but records without bytes
            checksums.append(end + 4)
        folder, _, number = record.filename.rpartition("/")
        if folder.endswith("/data"):
            found[number] = Record(offset, record.file_size, tuple(checksums))
    return found
