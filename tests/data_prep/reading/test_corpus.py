import errno
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tarfile

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from prep_fakes import lines, options, record, text, write_jsonl
from tokenizers import Tokenizer

from data_prep.documents import Problems
from data_prep.prepare import prepare
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from data_prep.reading.indexed import export
from data_prep.reading.inputs import InputFile
from data_prep.tokenization.vocabularies import open_tokenizer
from megatron_ext.utils.errors import UserError


def read(source, on_error="stop", domain=None, **given):
    problems = Problems(on_error)
    seen: list[int] = []
    corpus = open_files(source, Fields(default=domain), **given)
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
def test_what_the_disk_says_is_not_the_files_fault(tmp_path, monkeypatch, error):
    """Disk errors are raised even if bad records are skipped."""
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
        (str(tmp_path / "b.parquet"), "no text"): 1,
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
    reasons = ("no text", "not JSON", "not UTF-8", "tar broken")
    assert problems.counts == {(str(tmp_path / "a.tar"), reason): 1 for reason in reasons}


def damaged(number):
    """Return a function that flips one bit in the header of a tar member."""
    return lambda tar: tar[: 1024 * number + 3] + bytes([tar[1024 * number + 3] ^ 1]) + tar[1024 * number + 4 :]


@pytest.mark.parametrize(
    ("change", "whole", "said"),
    [
        (lambda tar: tar, 9, ""),
        (lambda tar: tar[: 9 * 1024 + 512], 9, ""),  # one block of zeros instead of the usual two
        (damaged(6), 5, "after sample '4': bad checksum"),
        (lambda tar: tar[: 6 * 1024], 5, "after sample '4': it ends without a closing block of zeros"),
        (lambda tar: tar[: 6 * 1024 + 100], 5, "after sample '4': truncated header"),
        (
            lambda tar: tar + tar,
            9,
            "after sample '8': data follows the end of the tar, and only one tar per file is read",
        ),
    ],
)
def test_what_a_reader_of_tars_takes_for_the_end(tmp_path, change, whole, said):
    """Nine samples, each with a header block and a content block.

    A sample counts as complete only if a valid block follows it.
    """
    tar_of(tmp_path / "a.tar", [(f"{i}.txt", text(i, 10).encode()) for i in range(9)])
    content = (tmp_path / "a.tar").read_bytes()
    assert content[9 * 1024 :].count(0) == len(content) - 9 * 1024 < len(content)
    (tmp_path / "a.tar").write_bytes(change(content))
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert [item.text for item in documents] == [text(i, 10) for i in range(whole)]
    assert problems.counts == ({(str(tmp_path / "a.tar"), "tar broken"): 1} if said else {})
    if said:
        with pytest.raises(UserError) as caught:
            read(tmp_path, domain="Web")
        assert str(caught.value) == f"{tmp_path}/a.tar: tar broken ({said}); repair it or pass --on-error skip"


def test_members_that_belong_to_no_sample(tmp_path):
    """Names without a suffix or a key are counted. Members with WebDataset's reserved names are ignored."""
    names = ["README", "0.txt", ".hidden.txt", "in/1.txt", "in/plain", "__meta__/x"]
    tar_of(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert [item.text for item in documents] == ["0.txt", "in/1.txt"]
    assert problems.counts == {(str(tmp_path / "a.tar"), "not named <key>.<suffix>"): 3}
    with pytest.raises(
        UserError, match=r"a\.tar:README: not named <key>\.<suffix>; repair it or pass --on-error skip$"
    ):
        read(tmp_path, domain="Web")


@pytest.fixture
def tokens(tmp_path, tokenizer_file):
    """Folder with Megatron token files: one document of two sequences and one document of one."""
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
    with pytest.raises(UserError, match=r"^--source-tokenizer: is not given, but .* contains tokens; "):
        read(tokens)


def test_token_files_at_a_url(tokens, tokenizer_file, tmp_path, monkeypatch):
    """Files at a URL are copied to temporary files, which are removed after reading."""
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    for name in ("Law_text_document.bin", "Law_text_document.idx"):
        fsspec.filesystem("memory").put_file(str(tokens / name), f"/{tmp_path.name}/{name}")
    source = f"memory://{tmp_path.name}"
    documents, _, (told, total) = read(source, **given)
    assert [(item.text, item.domain) for item in documents] == [
        ("first half, second half 東京", "Law"),
        ("another", "Law"),
    ]
    assert (told, list((tmp_path / "copies").iterdir())) == (total, [])
    fsspec.filesystem("memory").rm_file(f"/{tmp_path.name}/Law_text_document.bin")
    with pytest.raises(UserError, match=r"^memory://.*/Law_text_document\.idx: has no \.bin beside it; "):
        read(source, **given)


READS_A_PAIR = """
import sys, time
import fsspec
from data_prep.documents import Problems
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from data_prep.tokenization.vocabularies import open_tokenizer

folder, tokenizer, stops_at = sys.argv[1:]
memory = fsspec.filesystem("memory")
for suffix in ("bin", "idx"):
    memory.put_file(f"{folder}/Law.{suffix}", f"/in/Law.{suffix}")

def stop():
    print("now", flush=True)
    time.sleep(60)

get_file = type(memory).get_file
def copied(self, source, target, **given):
    get_file(self, source, target, **given)
    if stops_at == "copying":
        stop()

type(memory).get_file = copied
for document in open_files("memory://in", tokenizer=open_tokenizer(tokenizer)).documents(Problems("stop")):
    stop()
"""


@pytest.mark.parametrize("stops_at", ["copying", "reading"])
def test_a_pair_at_a_url_leaves_nothing_when_its_reader_is_ended(tokens, tokenizer_file, tmp_path, stops_at):
    for suffix in ("bin", "idx"):
        (tmp_path / f"Law_text_document.{suffix}").rename(tmp_path / f"Law.{suffix}")
    (tmp_path / "copies").mkdir()
    given = os.environ | {"TMPDIR": str(tmp_path / "copies"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def ended_by(number):
        command = [sys.executable, "-c", READS_A_PAIR, str(tmp_path), str(tokenizer_file), stops_at]
        with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "now\n"
            left = [path.name for path in (tmp_path / "copies").glob("selectron-*")]
            process.send_signal(number)
        return left, [path.name for path in (tmp_path / "copies").glob("selectron-*")]

    first, after_kill = ended_by(signal.SIGKILL)
    assert (len(first), after_kill) == (1, first)
    second, after_term = ended_by(signal.SIGTERM)
    assert (len(second), after_term) == (1, [])
    assert second != first  # the leftovers of the killed process were removed


def test_more_tokens_than_the_index_tells_of(tokens, tokenizer_file):
    index, given = str(tokens / "Law_text_document.idx"), {"tokenizer": open_tokenizer(str(tokenizer_file))}
    with (tokens / "Law_text_document.bin").open("ab") as binary:
        size = binary.tell()
        binary.write(b"\1\0")
    said = rf"the last document ends at byte {size}, but the \.bin has {size + 2}"
    with pytest.raises(UserError, match=rf":3: does not fit its .bin \({said}\); repair it or "):
        read(tokens, **given)
    documents, problems, _ = read(tokens, "skip", **given)
    assert (len(documents), problems.counts) == (2, {(index, "does not fit its .bin"): 1})


def test_token_files_at_fault(tokens, tokenizer_file, tmp_path):
    tokenizer = open_tokenizer(str(tokenizer_file))
    tokenizer.vocab_size = 5
    _, problems, _ = read(tokens, "skip", tokenizer=tokenizer)
    index = str(tmp_path / "Law_text_document.idx")
    assert problems.counts == {(index, "not the tokens of --source-tokenizer"): 2}
    (tmp_path / "Law_text_document.bin").unlink()
    with pytest.raises(UserError, match=rf"^{re.escape(index)}: has no .bin beside it; "):
        read(tokens, tokenizer=open_tokenizer(str(tokenizer_file)))


# Offsets in the index of `tokens`: a header of 34 bytes, lengths of three sequences (int32), their positions and the
# document bounds (int64).
LENGTHS, STARTS, BOUNDS = 34, 34 + 12, 34 + 12 + 24


@pytest.mark.parametrize(
    ("at", "number", "said"),
    [
        (LENGTHS + 4, -1, r"sequence 1 has -1 tokens starting at byte \d+, but the previous one ends at \d+"),
        (LENGTHS + 8, 3000, r"a document has the bytes \d+ to \d+, but the \.bin has \d+"),
        (STARTS, 2, "sequence 0 has \\d+ tokens starting at byte 2, but the previous one ends at 0"),
        (
            STARTS + 16,
            2**40,
            r"sequence 2 has \d+ tokens starting at byte 1099511627776, but the previous one ends at \d+",
        ),
        (BOUNDS, 1, "the first document starts at sequence 1, not 0"),
        (BOUNDS + 8, -2, "a document has the sequences 0 to -2, but there are 3"),
        (BOUNDS + 8, 4, "a document has the sequences 0 to 4, but there are 3"),
    ],
)
def test_an_index_that_does_not_fit(tokens, tokenizer_file, at, number, said):
    """Documents before the contradiction are kept. Megatron's own reader returns bytes of other documents, or fails."""
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


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # as Megatron's own dataset
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
    with pytest.raises(UserError, match=r"mine_train_C4_text_document\.bin: already exists; "):
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


def names_of(source):
    return [item.id for item in read(source)[0]]


def test_links_are_followed_in_the_order_of_names(tmp_path):
    """Large corpora are often folders of links to the disks of their chunks."""
    for number in range(3):
        write_jsonl(tmp_path / f"disk{number}/deep/x.jsonl", [record("C4", text(number))])
    raw = tmp_path / "raw/train"
    write_jsonl(raw / "b/x.jsonl", [record("C4", text("own"))])
    (raw / "c").symlink_to(tmp_path / "disk1")
    (raw / "a").symlink_to(tmp_path / "disk0", target_is_directory=True)
    (raw / "d.jsonl").symlink_to(tmp_path / "disk2/deep/x.jsonl")
    expected = ["train/a/deep/x.jsonl:1", "train/b/x.jsonl:1", "train/c/deep/x.jsonl:1", "train/d.jsonl:1"]
    assert names_of(tmp_path / "raw") == expected
    (tmp_path / "linked").symlink_to(tmp_path / "raw")
    assert names_of(tmp_path / "linked") == expected
    before = open_files(tmp_path / "raw").identity()
    write_jsonl(tmp_path / "disk0/deep/x.jsonl", [record("C4", text("another"))])
    assert open_files(tmp_path / "raw").identity() != before


def test_links_in_a_circle_end(tmp_path):
    write_jsonl(tmp_path / "raw/a/x.jsonl", [record("C4", "x")])
    write_jsonl(tmp_path / "other/y.jsonl", [record("C4", "y")])
    (tmp_path / "raw/a/up").symlink_to("..")
    (tmp_path / "raw/a/itself").symlink_to(".")
    (tmp_path / "raw/other").symlink_to(tmp_path / "other")
    (tmp_path / "other/back").symlink_to(tmp_path / "raw/a")  # "raw/other" does not lie within this folder
    assert names_of(tmp_path / "raw") == ["a/x.jsonl:1", "other/back/x.jsonl:1", "other/y.jsonl:1"]


def test_two_links_to_one_folder_are_two_domains(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/x.txt").write_text("x")
    for name in ("Law", "Book"):
        (tmp_path / "raw" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "raw" / name).symlink_to(tmp_path / "disk")
    assert [item.domain for item in read(tmp_path / "raw")[0]] == ["Book", "Law"]


@pytest.mark.parametrize("target", ["gone.jsonl", "a.jsonl"])
def test_a_link_that_leads_nowhere_is_refused_where_it_would_be_read(tmp_path, target):
    write_jsonl(tmp_path / "raw/train/x.jsonl", [record("C4", "x")])
    (tmp_path / "raw/.#notes").symlink_to("someone@somewhere")
    assert names_of(tmp_path / "raw") == ["train/x.jsonl:1"]
    (tmp_path / "raw/train/a.jsonl").symlink_to(target)
    with pytest.raises(UserError, match=r"raw/train/a\.jsonl: is a broken link; fix it or remove it$"):
        open_files(tmp_path / "raw")


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "x.jsonl", [record("C4", "x")])
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refusing(path):
        if path == tmp_path / "closed":
            raise PermissionError(errno.EACCES, "not yours", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError):
        open_files(tmp_path)


def test_urls_of_this_machine_are_its_paths(tmp_path, tokens, tokenizer_file):
    """file:// URLs support links and Megatron files, unlike other URLs."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/linked").symlink_to(tokens)
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    documents, _, _ = read((tmp_path / "raw").as_uri(), **given)
    assert documents == read(tmp_path / "raw", **given)[0]
    assert open_files((tmp_path / "raw").as_uri(), **given).files == open_files(tmp_path / "raw", **given).files


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
    with pytest.raises(
        UserError, match=rf"^--input: {source} contains more than 3 files; combine them into JSON lines "
    ):
        open_files(source)
