"""Folders that all ranks write: complete or not there, read by any process, and every damage is named."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.testing import assert_close

from lightning_hybrid.functional.boxes import Box, boxes_of_shard
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.entries import Manifest
from lightning_hybrid.parallel.checkpoint.manifest import FILE, read_manifest
from lightning_hybrid.parallel.checkpoint.parts import Part, Piece, part_of
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.checkpoint.sharded import save_sharded
from tests.launch import run_ranks

FUSED = Split(0, (5, 3, 7))
DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64]


@given(
    sections=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    dim=st.integers(0, 1),
    tensor=st.integers(1, 3),
    data=st.integers(1, 4),
)
@settings(max_examples=200)
def test_boxes_of_all_shards_cover_the_whole_once(sections, dim, tensor, data):
    split, shape = Split(dim, tuple(sections)), [4, 4]
    shape[dim] = sum(sections)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    seen = torch.zeros_like(whole)
    for rank in range(tensor):
        mine = split.take(whole, tensor, rank)
        each = -(-len(mine) // data)
        for replica in range(data):
            rows = (min(len(mine), replica * each), min(len(mine), (replica + 1) * each))
            for box, local in boxes_of_shard(shape, split, tensor, rank, rows):
                assert torch.equal(box.view(whole), local.view(mine[slice(*rows)]))
                box.view(seen).add_(1)
    assert seen.eq(1).all()


def wholes():
    """Tensors of several kinds, equal on all ranks."""
    torch.manual_seed(0)
    tensors = {f"model.{dtype}": torch.randn(6, 3).to(dtype) for dtype in DTYPES}
    fused, empty = torch.randn(15, 4, dtype=torch.float64), torch.empty(0, 3)
    return {**tensors, "model.fused": fused, "model.step": torch.tensor(3.5), "model.empty": empty}


def parts_of(rank):
    """Rank r of two tensor ranks and two stages: the fused weight is split, one tensor is on one stage only."""
    tensors = wholes()
    parts = {name: part_of(tensor) for name, tensor in tensors.items() if name != "model.torch.bool" or rank > 1}
    parts["model.fused"] = part_of(FUSED.take(tensors["model.fused"], 2, rank % 2), FUSED, 2, rank % 2)
    return parts


ABOUT = Manifest("", {}, {"pipeline": 2, "tensor": 2}, epoch=1, global_step=7, tied={"model.head": "model.fused"})


def save_all(folder):
    rank = dist.get_rank()
    save_sharded(folder / "a.ckpt", parts_of(rank), {"loops": {"epoch": rank}}, ABOUT)
    first = read_manifest(folder / "a.ckpt").data
    dist.barrier()
    save_sharded(folder / "a.ckpt", parts_of(rank), {"loops": {"epoch": 5}}, ABOUT)
    caught = []
    for path in (folder / "file" / "b.ckpt", folder / "other", folder / "a\0b.ckpt"):
        try:
            save_sharded(path, parts_of(rank), {}, ABOUT)
        except (OSError, ValueError) as error:
            caught.append(str(error))
    return first, caught


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint that was saved twice, and what happened on the ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "file").write_text("no folder")
    (folder / "other").mkdir()
    (folder / "other" / "precious").write_text("the user's")
    return folder / "a.ckpt", run_ranks(4, save_all, folder)


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "copy.ckpt"))


def test_any_box_is_read_back_bit_for_bit(saved):
    reader, expected = FolderReader(saved[0]), wholes()
    assert set(reader.names) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(reader.whole(name), tensor)
        assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
    assert torch.equal(reader.whole("model.head"), expected["model.fused"])
    box = Box((2, 1), (9, 2))
    piece = Piece(box, torch.zeros(9, 2, dtype=torch.float64))
    reader.read({"model.fused": Part((15, 4), torch.float64, (piece,))})
    assert torch.equal(piece.data, box.view(expected["model.fused"]))
    assert reader.training() == {"loops": {"epoch": 5}}
    assert (reader.manifest.layout, reader.manifest.global_step) == (ABOUT.layout, 7)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_folder_too(saved):
    expected = {name: tensor for name, tensor in wholes().items() if tensor.numel()}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=FileSystemReader(saved[0] / "data-2"), no_dist=True)
    assert_close(found, expected, rtol=0, atol=0)


def test_each_box_is_written_once_and_by_several_ranks(saved):
    chunks = [chunk for entry in read_manifest(saved[0]).tensors.values() for chunk in entry.chunks]
    assert len({chunk.file for chunk in chunks}) == 4
    assert sum(chunk.box.numel for chunk in chunks) == sum(tensor.numel() for tensor in wholes().values())


def test_one_folder_takes_the_place_of_another(saved):
    path, outcomes = saved
    assert {first for first, _ in outcomes} == {"data-1"}
    assert sorted(child.name for child in path.iterdir()) == ["data-2", FILE]
    assert sorted(child.name for child in path.parent.iterdir()) == ["a.ckpt", "file", "other"]


def save_over_link(folder):
    save_sharded(folder / "first.ckpt", parts_of(dist.get_rank()), {"loops": 1}, ABOUT)
    if dist.get_rank() == 0:
        (folder / "last.ckpt").symlink_to("first.ckpt")
    dist.barrier()
    save_sharded(folder / "last.ckpt", parts_of(dist.get_rank()), {"loops": 2}, ABOUT)


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path):
    run_ranks(2, save_over_link, tmp_path)
    for name, loops in (("first", 1), ("last", 2)):
        reader = FolderReader(tmp_path / f"{name}.ckpt")
        assert reader.training() == {"loops": loops}
        assert all(torch.equal(reader.whole(key), tensor) for key, tensor in wholes().items() if "bool" not in key)


def test_what_cannot_be_written_is_an_error_on_all_ranks(saved):
    path, outcomes = saved
    for _, (no_folder, others, no_name) in outcomes:
        assert "file" in no_folder
        assert "null byte" in no_name
        assert "is a folder that is no checkpoint" in others
    assert (path.parent / "other" / "precious").read_text() == "the user's"


def damage(path, what):
    """Change the folder; returns what the error must name."""
    manifest = read_manifest(path)
    chunk = manifest.tensors["model.fused"].chunks[1]
    file = path / manifest.data / chunk.file
    if what == "bit":
        content = bytearray(file.read_bytes())
        value = wholes()["model.fused"]
        place = bytes(content).index(chunk.box.view(value).contiguous().numpy().tobytes())
        content[place] ^= 1
        file.write_bytes(content)
    elif what == "cut":
        file.write_bytes(file.read_bytes()[: chunk.offset + 10])
    elif what == "gone":
        file.unlink()
    else:
        text = json.loads((path / FILE).read_text())
        del text["tensors"]["model.fused"]["chunks"][1]
        (path / FILE).write_text(json.dumps(text))
        return "model.fused.*a shard is missing|lacks .* elements of model.fused"
    return f"model.fused cannot be read from .*{re.escape(chunk.file)}"


@pytest.mark.parametrize("what", ["bit", "cut", "gone", "shard"])
def test_damage_names_tensor_and_file(copied, what):
    pattern = damage(copied, what)
    with pytest.raises(RuntimeError, match=pattern):
        FolderReader(copied).whole("model.fused")


def test_other_folders_are_refused(copied, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing.ckpt"):
        FolderReader(tmp_path / "nothing.ckpt")
    (tmp_path / "foreign").mkdir()
    with pytest.raises(RuntimeError, match=r"has no manifest\.json: it is no sharded checkpoint"):
        FolderReader(tmp_path / "foreign")
    (tmp_path / "foreign" / ".metadata").touch()
    with pytest.raises(RuntimeError, match=r"by torch\.distributed\.checkpoint alone.*dcp_to_torch"):
        FolderReader(tmp_path / "foreign")
    partial = copied.rename(tmp_path / ".copy.ckpt.partial")
    with pytest.raises(RuntimeError, match="was never completed"):
        FolderReader(partial)
    shutil.rmtree(partial / read_manifest_text(partial)["data"])
    with pytest.raises(RuntimeError, match="lacks its data folder data-2"):
        FolderReader(partial.rename(tmp_path / "a.ckpt"))
    (tmp_path / "a.ckpt" / FILE).write_text('{"format": 99}')
    with pytest.raises(RuntimeError, match="later version"):
        FolderReader(tmp_path / "a.ckpt")


def read_manifest_text(path):
    return json.loads((path / FILE).read_text())


class Stop(BaseException):
    """A crash."""


@pytest.mark.parametrize("existing", [True, False])
def test_a_crash_at_any_point_of_a_commit_leaves_a_whole_checkpoint(tmp_path, monkeypatch, existing):
    """Every call of the operating system is the last one once."""
    source = tmp_path / "a.ckpt"
    number, done = 0, False
    while not done:
        shutil.rmtree(source, ignore_errors=True)
        if existing:
            write(source, "old")
        left = [number]
        with monkeypatch.context() as patch:
            for owner, name in [(Path, "rename"), (Path, "replace"), (folders, "sync"), (shutil, "rmtree")]:
                patch.setattr(owner, name, counted(getattr(owner, name), left))
            try:
                write(source, "new")
                done = True
            except Stop:
                pass
        if existing or done or source.exists():
            assert (source / read_manifest(source).data / "content").read_text() in ("old", "new")
        number += 1
    assert number > 4
    assert (source / read_manifest(source).data / "content").read_text() == "new"
    write(source, "newer")
    assert sorted(child.name for child in source.iterdir())[1:] == [FILE]
    folders.remove(source)
    assert list(tmp_path.iterdir()) == []


def write(path, text):
    data = folders.begin(path)
    (data / "content").write_text(text)
    folders.commit(path, data, Manifest(data.name, {}))
    folders.clean(path, data.name)


def counted(function, left):
    def call(*args, **kwargs):
        if left[0] == 0:
            raise Stop
        left[0] -= 1
        return function(*args, **kwargs)

    return call
