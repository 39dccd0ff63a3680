import errno
import io
import json
import re
import struct
import tarfile

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from prep_fakes import lines, options, text
from tokenizers import Tokenizer

from data_prep.documents import Problems
from data_prep.prepare import prepare
from data_prep.reading.corpus import open_files
from data_prep.reading.indexed import export
from data_prep.reading.inputs import InputFile
from data_prep.tokenization.vocabularies import open_tokenizer
from megatron_ext.errors import UserError


def read(source, on_error="stop", **given):
    problems = Problems(on_error)
    seen: list[int] = []
    corpus = open_files(source, **given)
    documents = list(corpus.documents(problems, seen.append))
    return documents, problems, (sum(seen), corpus.total_bytes)


def table(path, rows, **options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)


def test_parquet_rows_in_batches(tmp_path):
    rows = [
        {"text": text(i), "meta": {"redpajama_set_name": f"RedPajama{name}"}, "other": i}
        for i, name in enumerate(["C4", "ArXiv"] * 700)
    ]
    table(tmp_path / "x.parquet", rows, row_group_size=300)
    documents, _, (told, total) = read(tmp_path)
    assert [(item.text, item.domain) for item in documents] == [
        (text(i), name) for i, name in enumerate(["C4", "ArXiv"] * 700)
    ]
    assert documents[2].id == "x.parquet:3"
    assert told == total


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
def test_parquet_damaged_within_its_data(tmp_path, compression):
    """The footer is whole; what stands in whole pages before is kept."""
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
def test_what_the_disk_says_is_not_the_files_fault(tmp_path, monkeypatch, error):
    """Nothing is passed over for it."""
    path = tmp_path / "a.parquet"
    table(path, [{"text": text(i, 400)} for i in range(30)])

    class Failing(io.BytesIO):
        def read(self, *_):
            raise error

    monkeypatch.setattr(InputFile, "open", lambda _: Failing(path.read_bytes()))
    with pytest.raises(type(error), match=re.escape(str(error))):
        read(tmp_path, "skip", domain="Web")


def test_parquet_at_fault(tmp_path):
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
        (str(tmp_path / "b.parquet"), "Parquet file broken"): 1,
        (str(tmp_path / "c.parquet"), "Parquet file broken"): 1,
    }


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_tars_of_text(tmp_path):
    facts = json.dumps({"meta": {"redpajama_set_name": "RedPajamaC4"}}).encode()
    whole = json.dumps({"text": "in the record", "domain": "Book"}).encode()
    members = [("a.txt", "naïve".encode()), ("a.json", facts), ("b.json", whole), ("c.txt", b"bare")]
    tar_of(tmp_path / "x.tar", members)
    documents, _, _ = read(tmp_path, domain="Web")
    assert [(item.id, item.text, item.domain) for item in documents] == [
        ("x.tar:a", "naïve", "C4"),
        ("x.tar:b", "in the record", "Book"),
        ("x.tar:c", "bare", "Web"),
    ]


def test_tar_at_fault(tmp_path):
    good = [(f"{i}.txt", text(i, 400).encode()) for i in range(9)]
    tar_of(tmp_path / "a.tar", [("x.txt", b"\xff"), ("y.json", b"{"), ("z.jpg", b"x"), *good])
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(UserError, match=r"a\.tar:x: not UTF-8 \(byte 0 of the text\); repair"):
        read(tmp_path, domain="Web")
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert 0 < len(documents) < 9
    assert [item.text for item in documents] == [text(i, 400) for i in range(len(documents))]
    assert sorted(reason for _file, reason in problems.counts) == ["no text", "not JSON", "not UTF-8", "tar broken"]


@pytest.fixture
def tokens(tmp_path, tokenizer_file):
    """Two documents of two sequences and of one, written by Megatron's own builder."""
    encode = Tokenizer.from_file(str(tokenizer_file)).encode
    builder = IndexedDatasetBuilder(str(tmp_path / "Law_text_document.bin"), dtype=np.uint16)
    parts = [encode("first half, ").ids, [*encode("second half 東京").ids, 0]]
    builder.add_document(torch.tensor(parts[0] + parts[1]), [len(part) for part in parts])
    builder.add_document(torch.tensor(encode("another").ids), [len(encode("another").ids)])
    builder.finalize(str(tmp_path / "Law_text_document.idx"))
    return tmp_path


def test_token_files_become_text_again(tokens, tokenizer_file):
    documents, _, (told, total) = read(tokens, tokenizer=open_tokenizer(str(tokenizer_file)))
    assert [(item.text, item.domain) for item in documents] == [
        ("first half, second half 東京", "Law"),
        ("another", "Law"),
    ]
    assert told == total
    with pytest.raises(UserError, match=r"^--source-tokenizer: is not given, but .* holds tokens; "):
        read(tokens)


def test_token_files_at_fault(tokens, tokenizer_file, tmp_path):
    tokenizer = open_tokenizer(str(tokenizer_file))
    tokenizer.vocab_size = 5
    _, problems, _ = read(tokens, "skip", tokenizer=tokenizer)
    index = str(tmp_path / "Law_text_document.idx")
    assert problems.counts == {(index, "not the tokens of --source-tokenizer"): 2}
    (tmp_path / "Law_text_document.bin").unlink()
    with pytest.raises(UserError, match=rf"^{re.escape(index)}: has no .bin beside it; "):
        read(tokens, tokenizer=open_tokenizer(str(tokenizer_file)))


# The index of `tokens`: 34 bytes, lengths of three sequences (int32), where they start, bounds of documents (int64).
LENGTHS, STARTS, BOUNDS = 34, 34 + 12, 34 + 12 + 24


@pytest.mark.parametrize(
    ("at", "number", "said"),
    [
        (LENGTHS + 4, -1, r"sequence 1 has -1 tokens from byte \d+ on, and the one before ends at \d+"),
        (LENGTHS + 8, 3000, r"a document of the bytes \d+ to \d+ of \d+"),
        (STARTS, 2, "sequence 0 has \\d+ tokens from byte 2 on, and the one before ends at 0"),
        (STARTS + 16, 2**40, r"sequence 2 has \d+ tokens from byte 1099511627776 on, and the one before ends at \d+"),
        (BOUNDS, 1, "the first document begins with sequence 1"),
        (BOUNDS + 8, -2, "a document of the sequences 0 to -2 of 3"),
        (BOUNDS + 8, 4, "a document of the sequences 0 to 4 of 3"),
    ],
)
def test_an_index_that_does_not_fit(tokens, tokenizer_file, at, number, said):
    """What stands before the contradiction is kept; Megatron's own reader takes bytes of other documents, or fails."""
    index = tokens / "Law_text_document.idx"
    content = bytearray(index.read_bytes())
    struct.pack_into("<i" if at < STARTS else "<q", content, at, number)
    index.write_bytes(content)
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(index))}:\d: does not fit its .bin \({said}\); repair it or "
    ):
        read(tokens, **given)
    documents, problems, _ = read(tokens, "skip", **given)
    assert problems.counts == {(str(index), "does not fit its .bin"): 1}
    assert [item.text for item in documents] == ["first half, second half 東京"][: len(documents)]
    assert len(documents) == (at in (LENGTHS + 8, STARTS + 16))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # as Megatron's own dataset causes
def test_token_files_cut_off(tokens, tokenizer_file):
    binary, index = tokens / "Law_text_document.bin", tokens / "Law_text_document.idx"
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    binary.write_bytes(binary.read_bytes()[:-1])
    documents, problems, _ = read(tokens, "skip", **given)
    assert [item.text for item in documents] == ["first half, second half 東京"]
    assert problems.counts == {(str(index), "does not fit its .bin"): 1}
    binary.write_bytes(b"")
    with pytest.raises(UserError, match=r"\.idx: has an empty \.bin beside it; repair it or pass"):
        read(tokens, **given)
    binary.write_bytes(b"12")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"\.idx: not an index of Megatron's \(buffer is smaller than .*\); repair it"):
        read(tokens, **given)


def test_a_document_of_too_many_tokens(tokens, tokenizer_file, monkeypatch):
    monkeypatch.setattr("data_prep.documents.LONGEST_TEXT", 8)
    documents, problems, _ = read(tokens, "skip", tokenizer=open_tokenizer(str(tokenizer_file)))
    assert [item.text for item in documents] == ["another"]
    assert {reason for _, reason in problems.counts} == {"too long"}


def test_what_is_exported_is_what_megatron_reads(records, tmp_path, tokenizer_file):
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2))
    prefixes = export(tmp_path / "out", manifest, tmp_path / "megatron/mine")
    assert [path.name for path in prefixes] == [
        f"mine_{entry.split}_{entry.domain}_text_document" for entry in manifest.domains
    ]
    library = Tokenizer.from_file(str(tokenizer_file))
    for prefix, entry in zip(prefixes, manifest.domains, strict=True):
        dataset = IndexedDataset(str(prefix))
        assert dataset.index.dtype == np.uint16
        assert dataset.document_indices.tolist() == list(range(entry.documents + 1))
        arrays = []
        for shard in entry.shards:
            with tarfile.open(tmp_path / "out" / shard.file) as tar:
                arrays += [np.load(io.BytesIO(tar.extractfile(m).read())) for m in tar if m.name.endswith(".npy")]
        assert [item.tolist() for item in dataset] == [item.tolist() for item in arrays]
        assert {int(item[-1]) for item in dataset} == {manifest.tokenizer.eos_id}
        assert sum(len(library.decode(item[:-1].tolist())) for item in dataset) == entry.characters
    with pytest.raises(UserError, match=r"mine_train_C4_text_document\.bin: is already there; "):
        export(tmp_path / "out", manifest, tmp_path / "megatron/mine")


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_urls(protocol, tmp_path):
    base = "memory://raw" if protocol == "memory" else (tmp_path / "raw").as_uri()
    content = lines(["C4", "ArXiv"], 5)
    for folder in ("train", "test"):
        with fsspec.open(f"{base}/{folder}/chunk1/x.jsonl.zst", "wb", auto_mkdir=True) as file:
            file.write(zstandard.compress("\n".join(content).encode()))
    documents, _, (told, total) = read(base)
    assert len(documents) == 20
    assert documents[0].id == "test/chunk1/x.jsonl.zst:1"
    assert {item.folder for item in documents} == {"train", "test"}
    assert told == total > 0
    before = open_files(base).identity()
    with fsspec.open(f"{base}/train/chunk1/y.jsonl", "wb") as file:
        file.write(content[0].encode())
    assert open_files(base).identity() != before


def test_urls_at_fault():
    with pytest.raises(UserError, match=r"^--input: memory://absent does not exist; "):
        open_files("memory://absent")
    with pytest.raises(UserError, match=r"^--input: nosuch://x cannot be opened \(Protocol not known: nosuch"):
        open_files("nosuch://x")


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_more_files_than_a_worker_can_hold_the_list_of(place, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.reading.inputs.MOST_FILES", 3)
    source = str(tmp_path / "texts") if place == "disk" else f"memory://{tmp_path.name}"
    for number in range(3):
        with fsspec.open(f"{source}/a/{number}.txt", "w", auto_mkdir=True) as file:
            file.write(text(number))
    assert open_files(source).units == 3
    with fsspec.open(f"{source}/a/b/3.txt", "w", auto_mkdir=True) as file:
        file.write(text(3))
    with pytest.raises(UserError, match=rf"^--input: {source} holds more than 3 files; put them together, as lines "):
        open_files(source)
