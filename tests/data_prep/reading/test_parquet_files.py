"""Documents of Parquet files, whole and damaged."""

import errno
import io
import re

import pyarrow
import pyarrow.parquet
import pytest
from prep_fakes import text
from read_documents import read

from data_prep.reading.inputs import InputFile
from megatron_ext.utils.errors import UserError


def table(path, rows, **options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)


def test_parquet_rows_in_batches(tmp_path):
    rows = [
        {"text": text(i), "meta": {"redpajama_set_name": f"RedPajama{name}"}, "other": i}
        for i, name in enumerate(["C4", "ArXiv"] * 700)
    ]
    table(tmp_path / "x.parquet", rows, row_group_size=300)
    documents, _, (bytes_reported, total) = read(tmp_path)
    assert [(item.text, item.domain) for item in documents] == [
        (text(i), name) for i, name in enumerate(["C4", "ArXiv"] * 700)
    ]
    assert documents[2].id == "x.parquet:3"
    assert bytes_reported == total


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
def test_parquet_damaged_within_its_data(tmp_path, compression):
    """The footer is intact. Documents in intact earlier row groups are kept."""
    path = tmp_path / "a.parquet"
    table(path, [{"text": text(i, 400)} for i in range(30)], row_group_size=10, compression=compression)
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}:11: Parquet file broken \(.+\); repair it or pass"):
        read(tmp_path, domain="Web")
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert [item.text for item in documents] == [text(i, 400) for i in range(10)]
    assert problems.counts == {(str(path), "Parquet file broken"): 1}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "input/output error"), PermissionError("not yours")])
def test_file_system_error_is_not_a_malformed_file(tmp_path, monkeypatch, error):
    """Disk errors are raised even if bad records are skipped."""
    path = tmp_path / "a.parquet"
    table(path, [{"text": text(i, 400)} for i in range(30)])

    class Failing(io.BytesIO):
        def read(self, *_):
            raise error

    monkeypatch.setattr(InputFile, "open", lambda _: Failing(path.read_bytes()))
    with pytest.raises(type(error), match=re.escape(str(error))):
        read(tmp_path, "skip", domain="Web")


def test_malformed_parquet(tmp_path):
    binary = pyarrow.array([b"good", b"\xff", b" ", b"also good"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": binary}), tmp_path / "a.parquet")
    table(tmp_path / "b.parquet", [{"content": "x"}])
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"a\.parquet:2: not UTF-8 \(byte 0 of the value\); repair"):
        read(tmp_path, domain="Web")
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert [(item.text, item.domain) for item in documents] == [("good", "Web"), ("also good", "Web")]
    assert problems.counts == {
        (str(tmp_path / "a.parquet"), "not UTF-8"): 1,
        (str(tmp_path / "a.parquet"), "no text"): 1,
        (str(tmp_path / "b.parquet"), "no text"): 1,
        (str(tmp_path / "c.parquet"), "Parquet file broken"): 1,
    }
