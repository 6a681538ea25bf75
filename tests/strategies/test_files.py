import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_hybrid.strategies.files import WholeFiles


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


def test_what_is_no_local_file_goes_lightnings_way():
    path = "memory://folder/a.ckpt"
    WholeFiles().save_checkpoint({"a": 1}, path)
    assert WholeFiles().load_checkpoint(path, weights_only=True) == {"a": 1}
    with pytest.raises(TypeError, match="storage_options"):
        WholeFiles().save_checkpoint({}, path, storage_options={})
