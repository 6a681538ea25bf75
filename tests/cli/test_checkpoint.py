"""One process looks at checkpoints, makes files of them that any strategy loads, and names every damage."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_model
from torch.testing import assert_close

from lightning_hybrid.cli.checkpoint import main
from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.entries import Manifest
from lightning_hybrid.parallel.checkpoint.parts import Part, Piece, part_of
from lightning_hybrid.parallel.checkpoint.sharded import save_sharded
from tests.launch import run_ranks, run_trainers
from tests.test_checkpoints import BATCHES, COLUMNS, Mixed, train

LAYOUT = {"pipeline": 2, "zero_stage": 1}
SPLIT = {"pipeline": 1, "zero_stage": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": COLUMNS}


def save_both(folder):
    """Train under two layouts for an epoch; save folders, and one file of the same state."""
    warnings.filterwarnings("ignore", ".*It has no rule for parts")  # what the plan does to numbers is no matter here
    for name, layout in (("stages", LAYOUT), ("columns", SPLIT)):
        trainer, _ = train(layout, "adamw", epochs=1)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        trainer.strategy.options = {**trainer.strategy.options, "state_dict_type": "full"}
        trainer.save_checkpoint(folder / f"{name}-full.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_trainers(2, save_both, folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved / "stages.ckpt", tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def run(*args):
    return main([str(arg) for arg in args])


def check_same(found, expected, path="checkpoint"):
    """Equal to the bit, and of the same keys; both runs were saved twice, so that times of callbacks differ."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            check_same(found[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for n, value in enumerate(expected):
            check_same(found[n], value, f"{path}[{n}]")
    elif isinstance(expected, torch.Tensor):
        assert_close(found, expected, rtol=0, atol=0, msg=path)
    else:
        assert found == expected, path


@pytest.mark.parametrize("name", ["stages", "columns"])
def test_exported_file_is_the_full_checkpoint(saved, tmp_path, name, capsys):
    assert run("export", saved / f"{name}.ckpt", tmp_path / "out.ckpt") == 0
    assert f"{tmp_path / 'out.ckpt'}: " in capsys.readouterr().out
    found = torch.load(tmp_path / "out.ckpt", weights_only=True)
    full = torch.load(saved / f"{name}-full.ckpt", weights_only=True)
    check_same(found, full)
    state = found["state_dict"]
    assert state["tied.weight"].data_ptr() == state["inlet.weight"].data_ptr()
    assert found["optimizer_states"][0]["state"].keys() == full["optimizer_states"][0]["state"].keys()


def test_a_stock_strategy_goes_on_from_an_exported_file(saved, tmp_path):
    """As if one process had trained all along."""
    run("export", saved / "stages.ckpt", tmp_path / "out.ckpt")
    trainer, losses = train(None, "adamw", tmp_path / "out.ckpt")
    expected, all_losses = train(None, "adamw")
    assert_close(losses, all_losses[BATCHES:], rtol=1e-9, atol=1e-12)
    assert_close(trainer.model.state_dict(), expected.model.state_dict(), rtol=1e-9, atol=1e-12)
    assert_close(trainer.optimizers[0].state_dict(), expected.optimizers[0].state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("source", ["stages", "stages-full"])
def test_weights_alone_load_as_lightnings_and_safetensors(saved, tmp_path, source):
    path = saved / f"{source}.ckpt"
    assert run("export", "--weights-only", path, tmp_path / "out.ckpt") == 0
    assert run("export", path, tmp_path / "out.safetensors") == 0
    state = torch.load(saved / "stages-full.ckpt", weights_only=True)["state_dict"]
    found = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert "optimizer_states" not in found
    module = Mixed.load_from_checkpoint(tmp_path / "out.ckpt", weights_only=True, kind="adamw")
    assert_close(dict(module.state_dict()), dict(state), rtol=0, atol=0)
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(state) - {"tied.weight"}
        assert file.metadata() == {"format": "pt", "tied.weight": "inlet.weight"}
    again = Mixed("adamw")
    load_model(again, tmp_path / "out.safetensors")
    assert_close(dict(again.state_dict()), dict(state), rtol=0, atol=0)


def test_inspect_tells_tensors_ties_layout_and_sizes(saved, capsys):
    assert run("inspect", saved / "columns.ckpt") == 0
    text = capsys.readouterr().out
    assert re.search(r"columns\.ckpt: sharded, in data-1, written by .*tensor 2", text)
    assert re.search(r"^epoch \d, step 3$", text, re.MULTILINE)
    assert re.search(r"^model\.blocks\.0\.linear\.weight +\d+ x \d+ +float64 +[\d,]+ +2$", text, re.MULTILINE)
    assert "model.tied.weight is model.inlet.weight" in text
    assert re.search(r"^optimizer 0: \d+ tensors, [\d,]+ bytes \(exp_avg, exp_avg_sq, step\)$", text, re.MULTILINE)
    assert "optimizer.0.inlet.weight.exp_avg " not in text
    run("inspect", "--all", saved / "columns.ckpt")
    more = capsys.readouterr().out
    assert "optimizer.0.inlet.weight.exp_avg " in more
    run("inspect", "--all", saved / "columns-full.ckpt")
    full = capsys.readouterr().out
    assert [line for line in full.splitlines() if line.startswith("optimizer 0")] == [
        line for line in more.splitlines() if line.startswith("optimizer 0")
    ]
    assert "model.tied.weight is model.inlet.weight" in full


def test_whole_checkpoints_verify(saved, capsys):
    for name in ("stages", "columns", "columns-full"):
        assert run("verify", saved / f"{name}.ckpt") == 0
        assert re.search(rf"{name}\.ckpt is whole: \d+ tensors, [\d,]+ bytes", capsys.readouterr().out)


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def middle_of(path, name):
    """File and first byte of the elements of a tensor's first chunk."""
    manifest = json.loads((path / "manifest.json").read_text())
    chunk = manifest["tensors"][name]["chunks"][0]
    file = path / manifest["data"] / chunk["file"]
    return file, chunk["offset"] + 3


def test_every_damage_is_named_with_tensor_and_file(copied, capsys):
    file, offset = middle_of(copied, "model.inlet.weight")
    flip(file, offset)
    (copied / "data-1" / "training.pt").unlink()
    assert run("verify", copied) == 1
    printed = capsys.readouterr()
    assert re.search(rf"^model\.inlet\.weight cannot be read from {file}: ", printed.out, re.MULTILINE)
    assert "training.pt is missing" in printed.out
    assert "is damaged (2 error(s))" in printed.err
    file.unlink()
    assert run("verify", copied) == 1
    assert f"{file}: the file is missing" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_not_exported(copied, capsys):
    flip(*middle_of(copied, "model.inlet.weight"))
    for name in ("out.ckpt", "out.safetensors"):
        assert run("export", copied, copied.parent / name) == 1
        assert "model.inlet.weight cannot be read from" in capsys.readouterr().err
    assert [path.name for path in copied.parent.iterdir()] == ["a.ckpt"]


def test_a_chunk_that_is_gone_from_the_manifest_is_missed(copied, capsys):
    manifest = json.loads((copied / "manifest.json").read_text())
    del manifest["tensors"]["model.inlet.weight"]["chunks"][0]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    assert run("verify", copied) == 1
    assert re.search(r"chunks of model\.inlet\.weight in .*data-1 are not the whole", capsys.readouterr().out)


def test_a_damaged_file_is_named_with_its_record(saved, tmp_path, capsys):
    shutil.copy(saved / "stages-full.ckpt", tmp_path / "a.ckpt")
    weight = torch.load(saved / "stages-full.ckpt", weights_only=True)["state_dict"]["blocks.0.linear.weight"]
    content = (tmp_path / "a.ckpt").read_bytes()
    flip(tmp_path / "a.ckpt", content.index(weight.numpy().tobytes()) + 3)
    assert run("verify", tmp_path / "a.ckpt") == 1
    out = capsys.readouterr().out
    assert re.search(
        r"^model\.blocks\.0\.linear\.weight \(archive/data/\d+\) in .*a\.ckpt is not what was written", out
    )
    (tmp_path / "a.ckpt").write_bytes((tmp_path / "a.ckpt").read_bytes()[:1000])
    for command in (["verify"], ["inspect"]):
        assert run(*command, tmp_path / "a.ckpt") == 1
        assert "a.ckpt" in capsys.readouterr().err


class Unknown:
    """A class that weights_only does not know."""


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of torch, for a group of one process
def test_what_is_no_complete_checkpoint_is_refused_in_one_line(saved, copied, tmp_path, capsys):
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shutil.copytree(tmp_path / "dcp", tmp_path / "fsdp")
    torch.save({}, tmp_path / "fsdp" / "meta.pt")
    (tmp_path / "nothing").mkdir()
    shutil.copytree(copied, tmp_path / ".b.ckpt.partial")
    shutil.rmtree(copied / "data-1")
    torch.save({"state_dict": {}, "x": Unknown()}, tmp_path / "unknown.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    cases = {
        "dcp": "written by torch.distributed.checkpoint alone.*dcp_to_torch",
        "fsdp": "such as FSDP.*consolidate_checkpoint",
        "nothing": "has no manifest.json",
        "a.ckpt": "lacks its data folder data-1",
        "b.ckpt": r"There is no checkpoint at .*\.b\.ckpt\.partial is what an interrupted save has left",
        ".b.ckpt.partial": "an interrupted save has left",
        "unknown.ckpt": r"holds .*Unknown.* Add --trust",
        "list.ckpt": "has no state_dict",
    }
    for name, pattern in cases.items():
        for command in (
            ["inspect", tmp_path / name],
            ["verify", tmp_path / name],
            ["export", tmp_path / name, "x.ckpt"],
        ):
            assert run(*command) == 1, name
            text = capsys.readouterr().err
            assert re.search(pattern, text), text
            assert text.count("\n") == 1, text
    assert run("export", saved / "stages-full.ckpt", tmp_path / "x.ckpt") == 1
    assert "is one file already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run("export", saved / "stages.ckpt", tmp_path / "x.bin")
    assert ended.value.code == 2
    assert run("inspect", "--trust", tmp_path / "unknown.ckpt") == 0


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""What is freed goes back at once, else glibc decides by what was freed before, and peaks differ from run to run."""
GROWTH = """
import re, sys
from pathlib import Path
import torch
from lightning_hybrid.cli.checkpoint import main
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
for source, path in zip(sys.argv[1::2], sys.argv[2::2]):
    before = peak()
    assert main(["export", source, path]) == 0
    print("growth", peak() - before)
"""


def save_large(folder):
    """Four tensors of 32 MiB: one whole, the others in columns of two ranks."""
    rank = dist.get_rank()
    parts = {"model.whole": part_of(torch.full((4096, 2048), 9.0))}
    for n in range(3):
        box = Box((0, 1024 * rank), (4096, 1024))
        parts[f"model.x{n}"] = Part((4096, 2048), torch.float32, (Piece(box, torch.full(box.sizes, float(n))),))
    small = {"model.x": part_of(torch.ones(2))}
    save_sharded(folder / "small.ckpt", small, {"state_dict": {}, "epoch": 0}, Manifest("", {}))
    save_sharded(folder / "large.ckpt", parts, {"state_dict": {}, "epoch": 0}, Manifest("", {}))


def test_export_takes_little_memory(tmp_path):
    """Of 128 MiB, some buffers of 16 MiB; two tensors of 32 MiB were allowed beside 64 MiB."""
    run_ranks(2, save_large, tmp_path)
    outs = [tmp_path / "out.ckpt", tmp_path / "out.safetensors"]
    pairs = [("small.ckpt", "small-out.ckpt"), *(("large.ckpt", out.name) for out in outs)]  # the first loads code
    command = [sys.executable, "-c", GROWTH, *(str(tmp_path / name) for pair in pairs for name in pair)]
    root, environment = Path(__file__).parents[2], {**os.environ, **GIVES_BACK}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    growths = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("growth")]
    assert len(growths) == 3
    assert sum(growths[1:]) < 96 * 2**20, growths
    found = torch.load(outs[0], weights_only=True, mmap=True)["state_dict"]
    assert [found[f"x{n}"].unique().tolist() for n in range(3)] == [[n] for n in range(3)]
    assert found["whole"].unique().tolist() == [9]
