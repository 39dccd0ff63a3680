import gzip
import re
from pathlib import Path

import pytest
import zstandard
from prep_fakes import lines, record, text, write_jsonl

from data_prep.documents import Problems, short_domain
from data_prep.reading.corpus import open_files
from data_prep.reading.inputs import local_file
from data_prep.reading.lines import read_lines
from megatron_ext.utils.errors import UserError


def read(path: Path, on_error: str = "stop"):
    problems = Problems(on_error)
    return list(open_files(path).documents(problems)), problems


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_all_formats_give_the_same_documents(tmp_path, suffix):
    content = lines(["C4", "ArXiv"], 30)
    data = "\n".join(content).encode()  # no newline after the last record
    packed = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[suffix](data)
    (tmp_path / f"x{suffix}").write_bytes(packed)
    documents, _ = read(tmp_path)
    assert [(item.domain, item.text) for item in documents] == [
        (domain, text(f"{domain}{i}", 5 + i % 60)) for i in range(30) for domain in ("C4", "ArXiv")
    ]
    assert documents[4].id == f"x{suffix}:5"
    assert all(item.folder is None for item in documents)


@pytest.mark.parametrize(("suffix", "pack"), [(".zst", zstandard.compress), (".gz", gzip.compress)])
def test_several_frames_are_one_stream_and_progress_counts_raw_bytes(tmp_path, suffix, pack):
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(pack(b"one\ntw") + pack(b"o\nthree"))
    seen: list[int] = []
    assert list(read_lines(local_file(path), seen.append)) == [b"one", b"two", b"three"]
    assert sum(seen) == path.stat().st_size


def test_split_folders(tmp_path):
    for folder in ("train", "validation", "test"):
        write_jsonl(tmp_path / folder / "chunk1" / "x.jsonl.zst", [record("C4", text(folder))])
    write_jsonl(tmp_path / "benchmark" / "x.jsonl", ['{"question": 1}'])
    documents, _ = read(tmp_path)
    assert {item.folder: item.text for item in documents} == {
        name: text(name) for name in ("train", "validation", "test")
    }
    assert open_files(tmp_path).folders == {"train", "validation", "test"}


def test_text_folder_takes_its_domains_from_first_level_folders(tmp_path):
    for name in ("law/deep/a.txt", "law/b.md", "code/c.py", "top.rst", "law/picture.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    documents, _ = read(tmp_path)
    assert [(item.id, item.domain) for item in documents] == [
        ("code/c.py", "code"),
        ("law/b.md", "law"),
        ("law/deep/a.txt", "law"),
        ("top.rst", tmp_path.name),
    ]


BAD = [
    (b'{"text": "x"', "not JSON"),
    (b'{"meta": {"redpajama_set_name": "RedPajamaC4"}}', "no text"),
    (b'{"text": "  ", "meta": {"redpajama_set_name": "RedPajamaC4"}}', "no text"),
    (b'["text"]', "no text"),
    (b'{"text": "x", "meta": {}}', "no domain"),
    (b'{"text": "\xff", "meta": {"redpajama_set_name": "RedPajamaC4"}}', "not UTF-8"),
    (b'{"text": "\\ud800", "meta": {"redpajama_set_name": "RedPajamaC4"}}', "text is not valid Unicode"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_malformed_record_stops_with_its_line_or_is_counted(tmp_path, line, reason):
    good = record("C4", "good").encode()
    path = tmp_path / "x.jsonl"
    path.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    with pytest.raises(UserError) as caught:
        read(path)
    assert re.fullmatch(
        rf"{re.escape(str(path))}:3: {reason}( \(.*\))?; (repair it|give .*) or pass --on-error skip", str(caught.value)
    )
    documents, problems = read(path, "skip")
    assert len(documents) == 2
    assert problems.counts == {(str(path), reason): 1}


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_broken_stream_keeps_the_complete_records(tmp_path, suffix, damage):
    data = "\n".join(lines(["C4"], 3000)).encode()
    packed = bytearray(gzip.compress(data) if suffix == ".jsonl.gz" else zstandard.compress(data))
    if damage == "truncated":
        del packed[len(packed) // 2 :]
    else:
        packed[:2] = b"\0\0"
    path = tmp_path / f"x{suffix}"
    path.write_bytes(packed)
    write_jsonl(tmp_path / "y.jsonl", lines(["ArXiv"], 2))
    with pytest.raises(UserError, match=re.escape(str(path)) + r":\d+: compressed stream broken \("):
        read(tmp_path)
    documents, problems = read(tmp_path, "skip")
    assert [item.domain for item in documents][-2:] == ["ArXiv", "ArXiv"]
    assert problems.counts == {(str(path), "compressed stream broken"): 1}


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "b.txt").write_text("café")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 \(byte 3\); "):
        read(tmp_path)
    documents, problems = read(tmp_path, "skip")
    assert [item.text for item in documents] == ["café"]
    assert problems.counts == {(str(tmp_path / "a.txt"), "not UTF-8"): 1}


@pytest.mark.parametrize("make", [lambda path: path / "absent", lambda path: path])
def test_nothing_to_read(tmp_path, make):
    with pytest.raises(UserError, match=r"^--input: .*; give a f"):
        open_files(make(tmp_path))


def test_top_level_domain_key(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", ['{"text": "x", "domain": "Law"}'])
    corpus = open_files(path)
    assert [item.domain for item in corpus.documents(Problems())] == ["Law"]


@pytest.mark.parametrize(
    ("name", "short"), [("RedPajamaC4", "C4"), ("redpajamaArXiv", "ArXiv"), ("C4", "C4"), ("RedPajama", "RedPajama")]
)
def test_short_domain(name, short):
    assert short_domain(name) == short
