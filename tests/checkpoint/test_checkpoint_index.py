"""Index of a checkpoint: equal to torch's, and rebuilt only if a location changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.checkpoint import index
from megatron_ext.checkpoint.index import FILE_NAME, Index, encode_results


def written(name: str, offset: int) -> list[WriteResult]:
    location = _StorageInfo(relative_path=f"{name}.distcp", offset=offset, length=3)
    tensor, value = MetadataIndex(name, torch.Size([0]), 4), MetadataIndex("é")
    return [WriteResult(tensor, 3, location), WriteResult(value, 2, location)]


def results(name: str, offset: int) -> str:
    return encode_results(written(name, offset))


@pytest.fixture
def metadata() -> Metadata:
    return Metadata({"a": BytesStorageMetadata(), "b": BytesStorageMetadata()})


def test_the_index_equals_torchs_without_the_folder(tmp_path: Path, metadata: Metadata) -> None:
    ours, torchs = tmp_path / "ours", tmp_path / "torchs"
    ours.mkdir(), torchs.mkdir()
    Index().write(ours, metadata, [results("a", 0), results("b", 7)])
    found = FileSystemReader(ours).read_metadata()
    assert str(ours).encode() not in (ours / FILE_NAME).read_bytes()
    FileSystemWriter(torchs).finish(metadata, [written("a", 0), written("b", 7)])
    expected = FileSystemReader(torchs).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.storage_data[MetadataIndex("b", torch.Size([0]))].offset == 7


def test_the_index_is_rebuilt_only_if_a_location_changes(
    tmp_path: Path, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    finish = FileSystemWriter.finish

    def recording_finish(self: FileSystemWriter, *args: object) -> None:
        built.append(Path(self.path))
        finish(self, *args)

    monkeypatch.setattr(index.FileSystemWriter, "finish", recording_finish)
    folders, index_writer = [tmp_path / str(number) for number in range(4)], Index()
    for folder, offset in zip(folders, (0, 0, 4, 4), strict=True):
        folder.mkdir()
        index_writer.write(folder, metadata, [results("a", 0), results("b", offset)])
    assert built == [folders[0], folders[2]]
    for folder, offset in zip(folders, (0, 0, 4, 4), strict=True):
        found = FileSystemReader(folder).read_metadata()
        assert found.storage_data[MetadataIndex("b", torch.Size([0]))].offset == offset
        assert [path.name for path in folder.iterdir()] == [FILE_NAME]
