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
from megatron_ext.checkpoint.index import FILE_NAME, Index, encoded


def written(name: str, offset: int) -> list[WriteResult]:
    place = _StorageInfo(relative_path=f"{name}.distcp", offset=offset, length=3)
    return [WriteResult(MetadataIndex(name, torch.Size([0]), 4), 3, place), WriteResult(MetadataIndex("é"), 2, place)]


def results(name: str, offset: int) -> str:
    return encoded(written(name, offset))


@pytest.fixture
def metadata() -> Metadata:
    return Metadata({"a": BytesStorageMetadata(), "b": BytesStorageMetadata()})


def test_it_is_torchs_own_but_for_the_folder(tmp_path: Path, metadata: Metadata) -> None:
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


def test_it_is_made_anew_where_something_lies_elsewhere(
    tmp_path: Path, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    finish = FileSystemWriter.finish

    def noting(self: FileSystemWriter, *args: object) -> None:
        made.append(Path(self.path))
        finish(self, *args)

    monkeypatch.setattr(index.FileSystemWriter, "finish", noting)
    folders, of_run = [tmp_path / str(number) for number in range(4)], Index()
    for folder, offset in zip(folders, (0, 0, 4, 4), strict=True):
        folder.mkdir()
        of_run.write(folder, metadata, [results("a", 0), results("b", offset)])
    assert made == [folders[0], folders[2]]
    for folder, offset in zip(folders, (0, 0, 4, 4), strict=True):
        found = FileSystemReader(folder).read_metadata()
        assert found.storage_data[MetadataIndex("b", torch.Size([0]))].offset == offset
        assert [path.name for path in folder.iterdir()] == [FILE_NAME]
