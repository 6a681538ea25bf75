"""Archives that are written around the elements of tensors are those of torch.save."""

import io
import zipfile

import pytest
import torch

from lightning_hybrid.parallel.checkpoint import frames
from lightning_hybrid.parallel.checkpoint.frames import FrameWriter

TENSORS = {
    "matrix": torch.randn(5, 3, dtype=torch.float64),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    "half": torch.randn(7).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False]),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "transposed": torch.randn(3, 4).t(),
    "slice": torch.randn(6, 4)[1::2, 1:3],
    "parameter": torch.nn.Parameter(torch.randn(5, 3)),
}


@pytest.mark.parametrize("block", [16, 2**24])
def test_archives_hold_the_tensors_and_their_checksums(tmp_path, monkeypatch, block):
    monkeypatch.setattr(frames, "BLOCK", block)
    file = FrameWriter(tmp_path / "file")
    written = {name: file.write(tensor) for name, tensor in TENSORS.items()}
    file.close()
    content = (tmp_path / "file").read_bytes()
    end = 0
    for name, place in written.items():
        assert place.offset == end, "one lies after the other"
        end += place.nbytes
        archive, expected = io.BytesIO(content[place.offset : end]), TENSORS[name].detach().resolve_conj()
        found = torch.load(archive, weights_only=True)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.is_contiguous()
        data = expected.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found.reshape(-1).view(torch.uint8), data)
        assert content[place.begin : place.begin + len(data)] == bytes(data.tolist())
        records = zipfile.ZipFile(archive)
        assert records.testzip() is None
        info = next(record for record in records.infolist() if record.filename.endswith("data/0"))
        assert (info.CRC, info.file_size) == (place.crc32, len(data))
    assert end == len(content)


def test_archives_have_the_records_of_those_that_torch_writes(tmp_path):
    file = FrameWriter(tmp_path / "file")
    file.write(TENSORS["matrix"])
    file.close()
    torch.save(TENSORS["matrix"], tmp_path / "archive")
    ours, theirs = (zipfile.ZipFile(tmp_path / name) for name in ("file", "archive"))
    ids = ".data/serialization_id"  # made of names and checksums, of which a frame has none
    for mine, other in zip(ours.infolist(), theirs.infolist(), strict=True):
        kind = mine.filename.partition("/")[2]
        assert kind == other.filename.partition("/")[2]
        assert mine.file_size == other.file_size
        assert ours.read(mine) == theirs.read(other) or kind == ids


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        FrameWriter(tmp_path / "file")
