"""What `manifest.py` does with folders that something else has left as they are."""

import pytest

from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.entries import Manifest
from lightning_hybrid.parallel.checkpoint.hollow import Hollow
from lightning_hybrid.parallel.checkpoint.manifest import FILE, read_manifest
from lightning_hybrid.strategies.files import WholeFiles
from tests.parallel.checkpoint.test_sharded import write


def content(path):
    return (path / read_manifest(path).data / "content").read_text()


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', Manifest("data-7", {}).to_json()])
def test_a_damaged_checkpoint_can_be_replaced(tmp_path, text):
    path = tmp_path / "a.ckpt"
    write(path, "old")
    (path / FILE).write_text(text)
    write(path, "new")
    assert content(path) == "new"
    assert len(list(path.iterdir())) == 2


def test_a_link_is_replaced_and_not_what_it_links_to(tmp_path):
    write(tmp_path / "best.ckpt", "best")
    last = tmp_path / "last.ckpt"
    last.symlink_to("best.ckpt")
    write(last, "last")
    assert not last.is_symlink()
    assert (content(last), content(tmp_path / "best.ckpt")) == ("last", "best")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_a_file_is_replaced(tmp_path):
    (tmp_path / "a.ckpt").write_text("a file")
    write(tmp_path / "a.ckpt", "new")
    assert content(tmp_path / "a.ckpt") == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_takes_the_place_of_a_folder_or_a_link_to_one(tmp_path):
    for name, save in [("a.ckpt", lambda path: WholeFiles().save_checkpoint({"a": 1}, path)), ("b.ckpt", hollow)]:
        write(tmp_path / name, "old")
        save(tmp_path / name)
        assert (tmp_path / name).is_file()
    write(tmp_path / "best.ckpt", "best")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    hollow(tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert content(tmp_path / "best.ckpt") == "best"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt", "best.ckpt", "last.ckpt"]


def hollow(path):
    with Hollow(path):
        pass


def test_the_next_save_ends_removals_that_were_cut_short_and_touches_nothing_else(tmp_path):
    for name in ("b.ckpt", "c.ckpt"):
        write(tmp_path / name, name)
        (tmp_path / name).rename(folders.hidden(tmp_path / name, "removed"))
    (tmp_path / ".c.ckpt.removed" / FILE).unlink()
    (tmp_path / ".mine.removed").mkdir()
    (tmp_path / ".mine.removed" / "note").write_text("the user's")
    (tmp_path / ".file.removed").write_text("the user's")
    write(tmp_path / "a.ckpt", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.removed", ".mine.removed", "a.ckpt"]


def test_lightning_does_not_count_what_is_unfinished(tmp_path):
    """It takes the greatest number behind "hpc_ckpt_", wherever that stands in a name, as the one to go on from."""
    assert "hpc_ckpt_" not in folders.hidden(tmp_path / "hpc_ckpt_3.ckpt", "partial").name
