"""One rank writes what many hold, in little memory; nobody runs ahead of it, or waits for a rank that is gone."""

import ctypes
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.checkpoint import stream
from lightning_hybrid.parallel.checkpoint.hollow import byte_view
from lightning_hybrid.parallel.checkpoint.parts import Part, Piece, part_of
from lightning_hybrid.parallel.checkpoint.stream import stream_parts, to_checkpoint, to_memory
from lightning_hybrid.parallel.checkpoint.stream_plan import make_plan
from tests.launch import run_ranks

FUSED, COLUMNS = Split(0, (5, 3, 7)), Split(1, (6,))
MIB = 2**20


def wholes():
    """Tensors of several kinds, equal on all ranks."""
    torch.manual_seed(0)
    kinds = [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e5m2]
    tensors = {f"model.{dtype}": torch.randn(5, 3).to(dtype) for dtype in kinds}
    tensors |= {"model.fused": torch.randn(15, 4), "model.columns": torch.randn(5, 6)}
    return {**tensors, "model.scalar": torch.tensor(2.5), "model.empty": torch.empty(0, 3), "model.late": torch.ones(3)}


def rows_of(tensor, size, rank):
    """A shard of the first dimension, as ZeRO leaves it."""
    each = -(-len(tensor) // size)
    begin, end = min(len(tensor), rank * each), min(len(tensor), (rank + 1) * each)
    box = Box((begin, *(0 for _ in tensor.shape[1:])), (end - begin, *tensor.shape[1:]))
    return Part(tuple(tensor.shape), tensor.dtype, (Piece(box, box.view(tensor)),))


def parts_of(rank):
    """Replicas, slices of two tensor ranks, shards of all ranks, and a tensor that the last rank alone knows."""
    parts = {name: part_of(tensor) for name, tensor in wholes().items() if name != "model.late" or rank == 3}
    for name, split in (("model.fused", FUSED), ("model.columns", COLUMNS)):
        parts[name] = part_of(split.take(wholes()[name], 2, rank % 2), split, 2, rank % 2)
    parts["model.torch.float64"] = rows_of(wholes()["model.torch.float64"], 4, rank)
    return parts


def stream_to_both(folder):
    """To a dictionary, and to a file in messages of 16 bytes."""
    found, parts = {}, parts_of(dist.get_rank())
    first = dist.get_rank() == 0
    stream_parts(parts, None, to_memory(found) if first else None)
    stream.BLOCK = 16
    build = lambda places: {"state_dict": dict(places), "tied": places["model.columns"], "epoch": 1}  # noqa: E731
    stream_parts(parts, None, to_checkpoint(folder / "a.ckpt", build) if first else None)
    return found


def test_first_rank_writes_what_all_hold(tmp_path):
    found, *others = run_ranks(4, stream_to_both, tmp_path)
    written = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert others == [{}, {}, {}]
    assert found.keys() == written["state_dict"].keys() == wholes().keys()
    for name, tensor in wholes().items():
        for copy in (found[name], written["state_dict"][name]):
            assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(byte_view(copy), byte_view(tensor)), name
    assert torch.equal(written["tied"], wholes()["model.columns"])


def peak(reset=False):
    """This process's largest resident memory since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


M_MMAP_THRESHOLD = -3  # of glibc: what is freed goes back at once, whatever was freed before


def growth_of_memory(folder):
    """What streaming takes beyond what each rank holds: 12 tensors of 8 MiB, in columns of two ranks."""
    rank, size, stream.BLOCK = dist.get_rank(), 2, 2 * MIB
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    split = Split(1, (1024,))

    def streamed(file, tensors, length):
        mine = {f"x{n}": torch.full((512, length), float(n)).t() for n in range(tensors)} if rank else {}
        parts = {name: part_of(tensor, split, size, rank - 1) for name, tensor in mine.items()}
        dist.barrier()
        before = peak(reset=True)
        stream_parts(parts, None, to_checkpoint(folder / file, dict) if rank == 0 else None)
        return peak() - before

    streamed("b.ckpt", 1, 2048)  # what is loaded at the first call is no matter of streaming
    return streamed("a.ckpt", 12, 2048)


def test_memory_is_that_of_one_tensor_and_buffers(tmp_path):
    """Of 96 MiB in all: the first rank completes one tensor of 8 MiB, and senders copy messages of 2 MiB."""
    first, *senders = run_ranks(3, growth_of_memory, tmp_path)
    assert first < (8 + 2 * 2 + 8) * MIB
    assert all(sender < (3 * 2 + 8) * MIB for sender in senders)
    found = torch.load(tmp_path / "a.ckpt", weights_only=True, mmap=True)
    assert [tensor.unique().tolist() for tensor in found.values()] == [[n] for n in range(12)]


def failures(folder):
    """What each rank says to parts that are not whole, a target that cannot be opened, and one that fails midway."""
    rank, said = dist.get_rank(), []
    first = rank == 0
    (folder / "file").write_text("")

    class Full(dict):
        def __getitem__(self, key):
            raise OSError(28, "No space left on device")

    whole = {"a": part_of(torch.ones(2**22)), "b": rows_of(torch.ones(2**22), 2, rank)}
    cases = [
        ({"x": rows_of(torch.ones(9), 3, rank)}, to_memory({})),
        ({"x": part_of(torch.ones(2 + rank))}, to_memory({})),
        (whole, to_checkpoint(folder / "file" / "a.ckpt", dict)),
        (whole, to_memory(Full())),
    ]
    for parts, target in cases:
        try:
            stream_parts(parts, None, target if first else None)
            said.append("nothing")
        except (ValueError, OSError) as error:
            said.append(str(error))
    found = {}
    stream_parts(whole, None, to_memory(found) if first else None)  # and they are still in step
    return said, found.get("b", torch.ones(1)).eq(1).all().item()


def test_all_ranks_hear_of_a_failure(tmp_path):
    for said, well in run_ranks(2, failures, tmp_path):
        assert well
        assert "6 of the 9 elements of x" in said[0]
        assert re.search(r"x is \[3\] of torch.float32 on rank 1 and \[2\]", said[1])
        assert "a.ckpt" in said[2] or "file" in said[2]
        assert "No space left" in said[3]
    assert not list(tmp_path.glob("**/*.ckpt*"))


def lose_a_rank(kind):
    """The last rank raises, or does not come; the others' group waits for 2 s."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=2), backend="gloo")
    parts = {"a": rows_of(torch.ones(2**24), 3, rank)}
    if rank == 2 and kind == "sleeps":
        time.sleep(4)
        return ""
    if rank == 2:
        parts["a"] = Part(*list(vars(parts["a"]).values())[:2], (Piece(parts["a"].pieces[0].box, None),))
    try:
        stream_parts(parts, group, to_memory({}) if rank == 0 else None)
    except stream.LostRankError as error:
        return str(error)
    except AttributeError:  # of the last rank
        return ""
    return "nothing"


def test_a_rank_that_does_not_come_is_an_error_on_all_others():
    first, second, _ = run_ranks(3, lose_a_rank, "sleeps")
    assert "A rank is gone" in first
    assert "no longer takes" in second or "A rank is gone" in second


def test_a_rank_that_fails_midway_is_an_error_on_all_others():
    first, second, _ = run_ranks(3, lose_a_rank, "raises")
    assert "Rank 2 did not send its part of a" in first
    assert "A rank is gone" in second or "no longer takes" in second


def test_overlapping_parts_are_refused():
    spec = ((4, 4), torch.float32)
    left, right = Box((0, 0), (4, 3)), Box((2, 2), (2, 2))
    with pytest.raises(ValueError, match=r"Ranks 0 and 1 hold parts of x that overlap"):
        make_plan([{"x": (spec, [left])}, {"x": (spec, [right])}])
