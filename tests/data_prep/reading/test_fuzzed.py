"""Random damage and random records: readers read or count every record once, and raise no unexpected error."""

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.documents import Problems
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from data_prep.tokenization.tokenizer import JsonTokenizer, train_tokenizer

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
RECORDS = VALUES | st.fixed_dictionaries(
    {"text": VALUES | st.just("good")},
    optional={"domain": VALUES, "meta": VALUES | st.fixed_dictionaries({"redpajama_set_name": VALUES})},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzzed")


def read(path: Path, **more: object) -> tuple[list[str], int]:
    """Return the texts and the number of counted problems, after checking that all output can be written as JSON."""
    problems = Problems("skip")
    documents = list(open_files(path, Fields(default="Web"), **more).documents(problems))
    reported = [*problems.counts, *((document.id, document.text, document.domain) for document in documents)]
    json.dumps(reported, ensure_ascii=False).encode()
    return [document.text for document in documents], problems.counts.total()


@QUICK
@given(records=st.lists(RECORDS, max_size=8))
def test_records_as_lines_and_members(folder, records):
    lines = [json.dumps(one) for one in records]  # including escaped lone surrogates, NaN and Infinity
    (folder / "a.jsonl").write_text("\n".join(lines))
    texts, counted = read(folder / "a.jsonl")
    assert len(texts) + counted == len(records)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, line in enumerate(lines):
            info = tarfile.TarInfo(f"{number}.json")
            info.size = len(line)
            tar.addfile(info, io.BytesIO(line.encode()))
    assert read(folder / "a.tar") == (texts, counted)


@QUICK
@given(content=st.binary(max_size=300), texts=st.lists(st.sampled_from(["a", "b\u2028", "\ufeffc"]), max_size=5))
def test_any_bytes_as_lines(folder, content, texts):
    good = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    data = good + content
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    for name, packed in (
        ("a.jsonl", data),
        ("a.jsonl.gz", gzip.compress(data)),
        ("a.jsonl.zst", zstandard.compress(data)),
    ):
        (folder / name).write_bytes(packed)
        found, counted = read(folder / name)
        assert found[: len(texts)] == texts
        assert len(found) + counted == len(lines)


SAMPLES = 6


def a_tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(SAMPLES):
            info = tarfile.TarInfo(f"{number}-{'é' * 60}.txt")  # a long name, which needs its own header
            info.size = 3
            tar.addfile(info, io.BytesIO(b"%03d" % number))
    return file.getvalue()


def a_table() -> bytes:
    file = io.BytesIO()
    rows = [{"text": f"{number:03d}", "meta": {"redpajama_set_name": "C4"}} for number in range(SAMPLES)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2, compression="zstd")
    return file.getvalue()


def lines() -> bytes:
    return "".join(json.dumps({"text": f"{number:03d}"}) + "\n" for number in range(SAMPLES)).encode()


WHOLE = {
    "a.tar": a_tar(),
    "a.parquet": a_table(),
    "a.jsonl": lines(),
    "a.jsonl.gz": gzip.compress(lines()),
    "a.jsonl.zst": zstandard.compress(lines()),
}


@pytest.mark.parametrize("name", WHOLE)
@QUICK
@given(data=st.data())
def test_damage(folder, name, data):
    """Changed bytes, a removed range or a truncated end cause no error, and no additional documents."""
    content = bytearray(WHOLE[name])
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4)
    ):
        content[place] = value
    start = data.draw(st.integers(0, len(content)))
    del content[start : start + data.draw(st.sampled_from([0, 1, 512, len(content)]))]
    (folder / name).write_bytes(content)
    texts, counted = read(folder / name)
    assert len(texts) <= SAMPLES + 1  # one line end may be lost and one may appear
    if bytes(content) == WHOLE[name]:
        assert (len(texts), counted) == (SAMPLES, 0)


@pytest.fixture(scope="module")
def tokenizer():
    return JsonTokenizer(train_tokenizer(["a b c"], 260))


@QUICK
@given(data=st.data())
def test_damaged_token_files(folder, tokenizer, data):
    """Three documents in Megatron's format, written byte by byte."""
    tokens = np.array([5, 6, 0, 7, 0, 8, 9, 10], np.uint16)
    lengths, starts, bounds = (
        np.array([3, 2, 3], np.int32),
        np.array([0, 6, 10], np.int64),
        np.arange(4, dtype=np.int64),
    )
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(bounds))
    index = bytearray(header + lengths.tobytes() + starts.tobytes() + bounds.tobytes())
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(index) - 1), st.integers(0, 255)), max_size=3)):
        index[place] = value
    del index[data.draw(st.sampled_from([len(index), *range(len(index))])) :]
    (folder / "pair").mkdir(exist_ok=True)
    (folder / "pair" / "a.bin").write_bytes(tokens.tobytes()[: data.draw(st.sampled_from([16, 16, 16, 15, 7, 0]))])
    (folder / "pair" / "a.idx").write_bytes(index)
    texts, counted = read(folder / "pair", tokenizer=tokenizer)
    assert len(texts) + counted <= 4
    assert texts or counted
