"""Files that are filled in afterwards are the files that their formats' own libraries write and read."""

import errno
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors import safe_open
from torch import nn

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint import hollow
from lightning_hybrid.parallel.checkpoint.hollow_safetensors import TYPES, HollowSafetensors
from lightning_hybrid.parallel.checkpoint.hollow_torch import HollowCheckpoint, placeholder

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
OTHERS = [torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOAT8, *OTHERS, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64]

half = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # of torch, for complex32


def values(dtype, *shape):
    """Any bytes that the type has; bool has two."""
    count = Box.of(shape).numel * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 120, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(hollow.byte_view(found), hollow.byte_view(expected))


def halves(shape):
    """Two boxes that lie in many runs each, the last first; one for small tensors."""
    if not shape or shape[-1] < 2:
        return [Box.of(shape)]
    left = shape[-1] // 2
    first = Box((0,) * len(shape), (*shape[:-1], left))
    return [Box((*first.offsets[:-1], left), (*shape[:-1], shape[-1] - left)), first]


def wholes():
    torch.manual_seed(0)
    kinds = {str(dtype): values(dtype, 3, 5) for dtype in DTYPES}
    return {**kinds, "scalar": torch.tensor(2.5, dtype=torch.float64), "empty": torch.empty(0, 4), "row": torch.ones(7)}


def write_all(file, places, tensors):
    for name, tensor in tensors.items():
        for box in halves(tensor.shape):
            file.write(places[name], box, box.view(tensor))


@dataclass
class Hidden:
    """A tensor where nobody looks for one."""

    tensor: torch.Tensor


@half
def test_filled_checkpoint_is_what_torch_would_have_saved(tmp_path):
    tensors, real = wholes(), torch.randn(4, 3)
    places = {name: placeholder(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    beside = {"real": real, "view": real[1:, :2], "parameter": nn.Parameter(torch.ones(2)), "tied": places["row"]}
    checkpoint = {"state_dict": {**places, **beside}, "epoch": 3, "callbacks": {"x": [(torch.arange(3), "text")]}}
    with HollowCheckpoint(tmp_path / "a.ckpt", checkpoint) as file:
        assert not (tmp_path / "a.ckpt").exists()
        write_all(file, places, tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    for mmap in (False, True):
        found = torch.load(tmp_path / "a.ckpt", weights_only=True, mmap=mmap)
        state = found["state_dict"]
        for name, tensor in {**tensors, "real": real, "view": real[1:, :2], "parameter": torch.ones(2)}.items():
            same(state[name], tensor)
        assert state["tied"].data_ptr() == state["row"].data_ptr()
        assert state["view"].untyped_storage().data_ptr() == state["real"].untyped_storage().data_ptr()
        assert (found["epoch"], found["callbacks"]["x"][0][0].tolist()) == (3, [0, 1, 2])
        assert isinstance(state["parameter"], nn.Parameter)


@half
def test_archive_has_the_records_and_checksums_of_one_that_torch_wrote_at_once(tmp_path):
    tensors = wholes()
    places = {name: placeholder(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with HollowCheckpoint(tmp_path / "a.ckpt", {"state_dict": places}) as file:
        write_all(file, places, tensors)
    with (tmp_path / "b.ckpt").open("wb") as whole:
        torch.save({"state_dict": tensors}, whole)
    with zipfile.ZipFile(tmp_path / "a.ckpt") as ours, zipfile.ZipFile(tmp_path / "b.ckpt") as theirs:
        assert ours.testzip() is None
        assert [i.filename for i in ours.infolist()] == [i.filename for i in theirs.infolist()]
        assert {i.filename: i.CRC for i in ours.infolist() if "/data/" in i.filename} == {
            i.filename: i.CRC for i in theirs.infolist() if "/data/" in i.filename
        }
    command = [sys.executable, "-m", "zipfile", "-t", str(tmp_path / "a.ckpt")]
    assert "Done testing" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_tensors_inside_other_objects_are_written(tmp_path):
    place, inner = placeholder((2,), torch.float32), torch.arange(6.0)
    with HollowCheckpoint(tmp_path / "a.ckpt", {"place": place, "object": Hidden(inner[2:])}) as file:
        file.write(place, Box.of((2,)), torch.ones(2))
    found = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert found["object"].tensor.tolist() == [2, 3, 4, 5]
    assert found["place"].tolist() == [1, 1]


def test_checksums_of_parts_in_any_order_are_right(tmp_path):
    place, tensor = placeholder((40, 30), torch.float32), torch.randn(40, 30)
    boxes = list(Box.of((40, 30)).cut(100))
    with patch.object(hollow, "BLOCK", 64), HollowCheckpoint(tmp_path / "a.ckpt", {"x": place}) as file:
        for box in reversed(boxes):
            file.write(place, box, box.view(tensor))
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        assert archive.testzip() is None
    same(torch.load(tmp_path / "a.ckpt", weights_only=True)["x"], tensor)


class Tied(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(0))


def test_lightning_loads_a_filled_checkpoint_with_tied_weights(tmp_path):
    torch.manual_seed(0)
    module = Tied(width=5)
    state = module.state_dict()
    places = {n: placeholder(tuple(t.shape), t.dtype) for n, t in state.items() if n != "second.weight"}
    checkpoint = {
        "state_dict": {name: places.get(name, places["first.weight"]) for name in state},
        "hyper_parameters": {"width": 5},
        "hparams_name": "kwargs",
        "pytorch-lightning_version": "2.6.0",
        "epoch": 0,
        "global_step": 0,
    }
    with HollowCheckpoint(tmp_path / "a.ckpt", checkpoint) as file:
        write_all(file, places, {name: state[name] for name in places})
    found = Tied.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    torch.testing.assert_close(found.state_dict(), state, rtol=0, atol=0)
    assert (tmp_path / "a.ckpt").stat().st_size < 4096 + sum(t.nbytes for t in state.values())


def test_a_file_larger_than_four_gibibytes_is_a_zip_archive(tmp_path):
    """Its middle is a hole of the file system, so that it takes neither time nor space."""
    place, last = placeholder((2**32 + 8,), torch.uint8), placeholder((3,), torch.float32)
    with HollowCheckpoint(tmp_path / "a.ckpt", {"x": place, "y": last}) as file:
        hole = file.holes[id(place.untyped_storage())]
        hole.written, hole.crc32 = hole.nbytes - 8, 7  # as if written; only the checksum is not right then
        file.write(place, Box((2**32,), (8,)), torch.arange(8, dtype=torch.uint8))
        hole.crc32 = 7
        file.write(last, Box.of((3,)), torch.arange(3.0))
    found = torch.load(tmp_path / "a.ckpt", weights_only=True, mmap=True)
    assert (found["x"][-8:].tolist(), found["y"].tolist()) == ([*range(8)], [0, 1, 2])
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        crc = {info.file_size: info.CRC for info in archive.infolist()}
        assert crc[2**32 + 8] == 7
        assert archive.read("archive/data/1") == torch.arange(3.0).numpy().tobytes()


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_what_is_not_whole_leaves_the_file_of_before(tmp_path, kind):
    path, place = tmp_path / "a.file", placeholder((8,), torch.float32)

    def make():
        if kind == "torch":
            return HollowCheckpoint(path, {"x": place}), place
        return HollowSafetensors(path, {"x": ((8,), torch.float32)}, {}), "x"

    path.write_text("before")
    file, name = make()
    file.write(name, Box((0,), (7,)), torch.ones(7))
    with pytest.raises(RuntimeError, match=r"4 bytes of .*a\.file were never written"):
        file.close()
    file, name = make()
    with pytest.raises(TypeError, match=r"float32.* is of torch\.float64"), file:
        file.write(name, Box.of((8,)), torch.ones(8, dtype=torch.float64))
    file, name = make()
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(os, "pwrite", side_effect=full), pytest.raises(OSError, match="No space"), file:
        file.write(name, Box.of((8,)), torch.ones(8))
    assert [child.name for child in tmp_path.iterdir()] == ["a.file"]
    assert path.read_text() == "before"


@half
def test_filled_safetensors_file_is_what_the_library_reads(tmp_path):
    tensors = {name: tensor for name, tensor in wholes().items() if tensor.dtype in TYPES}
    specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with HollowSafetensors(tmp_path / "a.safetensors", specs, {"format": "pt", "é": "ü"}) as file:
        write_all(file, {name: name for name in tensors}, tensors)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as found:
        assert set(found.keys()) == set(tensors)
        assert found.metadata() == {"format": "pt", "é": "ü"}
        for name, tensor in tensors.items():
            same(found.get_tensor(name), tensor)


def test_safetensors_refuses_a_type_that_it_has_not(tmp_path):
    with pytest.raises(ValueError, match=r"no type for x \(torch.complex128\).*\.ckpt"):
        HollowSafetensors(tmp_path / "a.safetensors", {"x": ((1,), torch.complex128)}, {})
    assert not list(tmp_path.iterdir())
