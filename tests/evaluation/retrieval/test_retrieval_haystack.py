"""Haystacks from the user's files, and rejected files."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from pathlib import Path

import pyarrow.parquet
import pytest
import zstandard

from megatron_ext.evaluation.retrieval.haystack import NOISE, insert, read_haystack
from megatron_ext.utils.errors import UserError


def test_without_a_path_hay_is_noise() -> None:
    hay = read_haystack(None)
    assert (hay.name, hay.cut(3, 2), hay.separator) == ("noise", [NOISE, NOISE], "\n")


def test_text_is_cut_in_sentences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One  is\nhere. Is two? Yes!\n\nNo stop " + "word " * 70)
    (tmp_path / "b.md").write_text("Last.")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    long = ["No stop" + " word" * 58, " ".join(["word"] * 12)]
    hay = read_haystack(str(tmp_path))
    assert list(hay.segments) == ["One is here.", "Is two?", "Yes!", *long, "Last."]
    assert hay.cut(5, 3) == ["Last.", "One is here.", "Is two?"]


def test_records_are_read_whatever_they_are_packed_in(tmp_path: Path) -> None:
    line = json.dumps({"text": "Of course. It is.", "meta": {}}).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(line)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(line))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["Of course. It is."]}), tmp_path / "d.parquet")
    with tarfile.open(tmp_path / "e.tar", "w") as tar:
        member = tarfile.TarInfo("0.txt")
        member.size = len(b"Of course. It is.")
        tar.addfile(member, io.BytesIO(b"Of course. It is."))
    assert list(read_haystack(str(tmp_path)).segments) == ["Of course.", "It is."] * 5


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none.txt", None, "none.txt does not exist; give a file or folder that contains text"),
        ("blank.txt", b" \n", "blank.txt: no text"),
        ("image.png", b"x", "contains no .jsonl"),
        ("tokens.idx", b"x", "tokens.idx contains tokens, not text; give a file or folder that contains text"),
        ("latin.txt", b"caf\xe9", "latin.txt: not UTF-8 (byte 3); repair it or choose another"),
        (
            "bad.jsonl",
            b'{"text": "Good."}\n{"txt": 1}\n',
            "bad.jsonl:2: no text (no `text` among its keys: txt); repair it or choose another",
        ),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "Good."}' * 99, mtime=0)[:-9], "cut.jsonl.gz:1: compressed stream"),
        ("cut.jsonl.zst", zstandard.compress(b'{"text": "Good."}\n' * 99)[:-1], "the file ends too early"),
        ("packed.jsonl.zst", b"no such thing", "packed.jsonl.zst:1: compressed stream broken"),
        ("bytes.jsonl", b'{"text": "caf\xe9"}', "bytes.jsonl:1: not UTF-8 (byte 13"),
        ("number.jsonl", b'{"text": 1}\n', "number.jsonl:1: no text (`text` is a number); repair it or choose another"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^retrieval.haystack: .*{re.escape(problem)}"):
        read_haystack(str(tmp_path / name))


def test_needles_stand_before_the_piece_at_their_depth() -> None:
    needles = [(1.0, "end"), (0.5, "middle"), (0.0, "start"), (0.55, "next")]
    assert insert(["a", "b", "c", "d"], needles) == ["start", "a", "b", "middle", "next", "c", "d", "end"]
