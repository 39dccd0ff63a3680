"""One bad record in files of every format: an error that names it, or a count by file and reason."""

import gzip
import io
import json
import re
import tarfile
from pathlib import Path

import prep_fakes
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep.prepare import prepare
from megatron_ext.utils.errors import UserError

GOOD = prep_fakes.lines(["C4", "CommonCrawl", "ArXiv"], 20)
PLACE = 7


def with_bad(line: bytes = b'{"text": ') -> bytes:
    return b"\n".join([*(good.encode() for good in GOOD[:PLACE]), line, *(good.encode() for good in GOOD[PLACE:]), b""])


def table() -> bytes:
    rows = [json.loads(line) for line in GOOD]
    rows[PLACE]["text"] = None
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def tar(broken: int | None = PLACE) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as writer:
        for number, line in enumerate(GOOD):
            member = tarfile.TarInfo(f"{number:03d}.json")
            content = b"{broken" if number == broken else line.encode()
            member.size = len(content)
            writer.addfile(member, io.BytesIO(content))
    return file.getvalue()


CASES = [
    ("a.jsonl", with_bad(), "a.jsonl:8: not JSON", 60),
    ("a.jsonl.gz", gzip.compress(with_bad()), "a.jsonl.gz:8: not JSON", 60),
    ("a.jsonl.zst", zstandard.compress(with_bad()), "a.jsonl.zst:8: not JSON", 60),
    ("a.jsonl", with_bad(b'{"text": "\xff"}'), "a.jsonl:8: not UTF-8", 60),
    ("a.jsonl", with_bad(b'{"domain": "C4"}'), "a.jsonl:8: no text", 60),
    ("a.jsonl", with_bad(b'{"text": "abc"}'), "a.jsonl:8: no domain", 60),
    ("a.jsonl", with_bad(b'{"text": "abc", "domain": ""}'), "a.jsonl:8: no domain", 60),
    ("a.jsonl", with_bad(b'{"text": "\\ud800", "domain": "C4"}'), "a.jsonl:8: text is not valid Unicode", 60),
    ("a.parquet", table(), "a.parquet:8: no text", 59),
    ("a.tar", tar(), "a.tar:007: not JSON", 59),
    # Truncated files: earlier records are kept. In a tar, a sample is complete when the next one has begun.
    ("a.jsonl.gz", gzip.compress("\n".join([*GOOD, ""]).encode())[:-4], "a.jsonl.gz:61: compressed stream broken", 60),
    ("a.tar", tar(broken=None).rstrip(b"\0")[:-9], "a.tar: tar broken", 59),
]


@pytest.mark.parametrize(("name", "content", "message", "expected"), CASES, ids=[message for _, _, message, _ in CASES])
def test_malformed_record_stops_or_is_skipped(tmp_path, tokenizer_file, name, content, message, expected):
    source = tmp_path / "raw" / name
    source.parent.mkdir()
    source.write_bytes(content)
    output = tmp_path / "out"
    with pytest.raises(UserError) as caught:
        prepare(prep_fakes.options(source.parent, output, tokenizer_file, filtering=prep_fakes.UNFILTERED))
    assert str(caught.value).startswith(f"{source.parent}/{message}")
    assert re.search(r"; (repair it|give .* with --\S+) or pass --on-error skip$", str(caught.value))
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    changes = {"on_error": "skip", "filtering": prep_fakes.UNFILTERED}
    manifest = prepare(prep_fakes.options(source.parent, output, tokenizer_file, **changes))
    (skipped,) = manifest.skipped
    assert (Path(skipped.file).name.split(":")[0], skipped.records) == (name, 1)
    assert message.endswith(f": {skipped.reason}")
    assert sum(entry.documents for entry in manifest.domains) == expected


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl.zst", zstandard.compress(with_bad(GOOD[0].encode()))[:-40], "compressed stream broken"),
        ("a.parquet", table()[:-30], "Parquet file broken"),
    ],
)
def test_input_without_readable_records(tmp_path, tokenizer_file, name, content, reason):
    source = tmp_path / name
    source.write_bytes(content)
    message = rf"^{source}:1: {reason} \(.*\); repair it or give another --input$"
    with pytest.raises(UserError, match=message):
        prepare(prep_fakes.options(source, tmp_path / "out", tokenizer_file))
