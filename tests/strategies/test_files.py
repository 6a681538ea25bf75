import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_hybrid.parallel.checkpoint.hollow_torch import HollowCheckpoint
from lightning_hybrid.strategies.files import WholeFiles
from tests.parallel.checkpoint.test_sharded import write


class Bomb:
    def __reduce__(self):
        raise OSError("disk full")


def test_file_appears_when_it_is_complete(tmp_path):
    WholeFiles().save_checkpoint({"a": torch.ones(2)}, tmp_path / "new" / "a.ckpt")
    assert torch.equal(TorchCheckpointIO().load_checkpoint(tmp_path / "new" / "a.ckpt")["a"], torch.ones(2))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.ckpt"]


def test_older_file_stays_when_writing_fails(tmp_path):
    file = tmp_path / "a.ckpt"
    WholeFiles().save_checkpoint({"a": 1}, file)
    with pytest.raises(OSError, match="disk full"):
        WholeFiles().save_checkpoint({"a": torch.zeros(10_000), "b": Bomb()}, file)
    assert torch.load(file) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def at_once(path):
    WholeFiles().save_checkpoint({"a": 1}, path)


def streamed(path):
    with HollowCheckpoint(path, {"a": 1}):
        pass


@pytest.mark.parametrize("save", [at_once, streamed])
def test_a_file_takes_the_place_of_a_checkpoints_folder_and_of_no_other(tmp_path, save):
    write(tmp_path / "last.ckpt", "of a run that saved folders")
    (tmp_path / "empty.ckpt").mkdir()
    for name in ("last.ckpt", "empty.ckpt"):
        save(tmp_path / name)
        assert torch.load(tmp_path / name) == {"a": 1}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("the user's")
    with pytest.raises(FileExistsError, match="other is a folder that is no checkpoint"):
        save(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.ckpt", "last.ckpt", "other"]
    assert (tmp_path / "other" / "precious").read_text() == "the user's"


@pytest.mark.parametrize("content", [lambda whole: b"", lambda whole: b"hello", lambda whole: whole[:-2000]])
def test_what_is_no_whole_file_is_named(tmp_path, content):
    file = tmp_path / "a.ckpt"
    WholeFiles().save_checkpoint({"a": torch.ones(10_000)}, file)
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(RuntimeError, match=r"a\.ckpt cannot be loaded: .* it is damaged, or no checkpoint"):
        WholeFiles().load_checkpoint(file)


def test_what_is_no_local_file_goes_lightnings_way():
    path = "memory://folder/a.ckpt"
    WholeFiles().save_checkpoint({"a": 1}, path)
    assert WholeFiles().load_checkpoint(path, weights_only=True) == {"a": 1}
    with pytest.raises(TypeError, match="storage_options"):
        WholeFiles().save_checkpoint({}, path, storage_options={})
