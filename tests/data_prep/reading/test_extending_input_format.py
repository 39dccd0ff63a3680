"""The example of docs/extending/input_format.md, registered in this process alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from extending import code_blocks

from data_prep.documents import Problems
from data_prep.reading import registry
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields

SUBTITLES = "1\n00:00:01,000 --> 00:00:02,500\nGood morning.\n\n2\n00:00:03,000 --> 00:00:04,000\nAt 7 o'clock?\n"


@pytest.fixture
def subtitles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the page's format until the end of the test."""
    monkeypatch.setattr(registry, "_FORMATS", list(registry.formats()))
    (code,) = code_blocks("input_format.md")
    exec(compile(code, "input_format.md", "exec"), {"__name__": "subtitles"})


@pytest.mark.usefixtures("subtitles")
def test_documented_example_format(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.SRT").write_text(SUBTITLES)
    (tmp_path / "train" / "b.srt").write_text("1\n00:00:01,000 --> 00:00:02,500\n")
    (tmp_path / "train" / "c.srt").write_bytes(b"\xff")
    (tmp_path / "notes.txt").write_text("beside")
    problems, seen = Problems("skip"), []
    corpus = open_files(tmp_path, Fields(default="Films"))
    (document,) = corpus.documents(problems, seen.append)
    assert (document.id, document.text, document.domain) == ("train/a.SRT", "Good morning.\nAt 7 o'clock?", "Films")
    assert document.folder == "train"
    assert {reason for _, reason in problems.counts} == {"no text", "not UTF-8"}
    assert sum(seen) == corpus.total_bytes
    assert [kind["suffix"] for kind in corpus.provenance()["not_read"]] == [".txt"]


def test_a_suffix_has_one_format() -> None:
    with pytest.raises(ValueError, match=r"two formats have the suffix \.parquet"):
        registry.register(".parquet")(lambda *_: iter(()))
