"""Selection of the input's files, and messages about the others."""

import re

import fsspec
import pytest
import zstandard
from prep_fakes import lines, options, record, text, write_jsonl

from data_prep.documents import Problems
from data_prep.manifest import load_manifest
from data_prep.prepare import prepare
from data_prep.reading import selection
from data_prep.reading.corpus import open_files
from data_prep.reading.inputs import InputFile
from data_prep.summary import format_summary
from megatron_ext.utils.errors import UserError


def files(root, *names, content="x"):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def not_read(source):
    return {
        (kind["suffix"], kind["reason"]): (kind["files"], kind["examples"])
        for kind in open_files(source).provenance()["not_read"]
    }


def test_unread_files_are_counted(tmp_path):
    files(tmp_path, "a.jsonl", "b.jsonl.xz", "sub/c.tar.gz", "d.json", "e.json", "sub/f.JSON", "g.json", "README")
    files(tmp_path, "notes.txt", "sub/code.py", "model.bin", "Law.bin", "Law.idx.bak", "X.IDX")
    assert [file.source for file in open_files(tmp_path).files] == ["a.jsonl"]
    assert not_read(tmp_path) == {
        (".json", selection.UNKNOWN_REASON): (4, ["d.json", "e.json", "g.json"]),
        (".jsonl.xz", selection.UNKNOWN_REASON): (1, ["b.jsonl.xz"]),
        (".tar.gz", selection.UNKNOWN_REASON): (1, ["sub/c.tar.gz"]),
        ("", selection.UNKNOWN_REASON): (1, ["README"]),
        (".bak", selection.UNKNOWN_REASON): (1, ["Law.idx.bak"]),
        (".idx", selection.UNKNOWN_REASON): (1, ["X.IDX"]),
        (".bin", "without an .idx beside it"): (2, ["Law.bin", "model.bin"]),
        (".txt", selection.BESIDE_REASON): (1, ["notes.txt"]),
        (".py", selection.BESIDE_REASON): (1, ["sub/code.py"]),
    }


def test_suffix_in_capitals(tmp_path):
    write_jsonl(tmp_path / "A.JSONL", [record("C4", "x")])
    (tmp_path / "B.Jsonl.ZST").write_bytes(zstandard.compress(record("C4", "y").encode()))
    corpus = open_files(tmp_path)
    assert [file.name for file in corpus.files] == ["A.JSONL", "B.Jsonl.ZST"]
    assert [item.text for item in corpus.documents(Problems())] == ["x", "y"]
    files(tmp_path / "texts", "A.TXT", "b.txt")
    assert (open_files(tmp_path / "texts").units, not_read(tmp_path / "texts")) == (2, {})


def test_outside_the_folders_of_splits(tmp_path):
    files(tmp_path, "train/a.jsonl", "test/deep/b.jsonl", "eval/c.jsonl", "d.parquet", "train/notes.md")
    assert not_read(tmp_path) == {
        (".jsonl", selection.OUTSIDE_REASON): (1, ["eval/c.jsonl"]),
        (".parquet", selection.OUTSIDE_REASON): (1, ["d.parquet"]),
        (".md", selection.BESIDE_REASON): (1, ["train/notes.md"]),
    }
    with fsspec.open(f"memory://{tmp_path.name}/x.jsonl", "w") as file:
        file.write(record("C4", "x"))
    with fsspec.open(f"memory://{tmp_path.name}/y.json", "w") as file:
        file.write("{}")
    assert not_read(f"memory://{tmp_path.name}") == {(".json", selection.UNKNOWN_REASON): (1, ["y.json"])}


def test_token_files_are_read_in_pairs(tmp_path):
    names = ("Book.bin", "Law.bin", "Law.idx", "sub/Law.bin")
    chosen = selection.select("x", [InputFile(name, tuple(name.split("/")), 1) for name in names])
    assert [file.source for file in chosen.files] == ["Law.idx"]
    assert [(kind["suffix"], kind["examples"]) for kind in chosen.not_read] == [(".bin", ["Book.bin", "sub/Law.bin"])]


def test_further_kinds_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "MAX_KINDS", 3)
    files(tmp_path, "a.jsonl", "x.json", "y.json", *(f"part.{number}" for number in range(6)))
    assert not_read(tmp_path) == {
        (".json", selection.UNKNOWN_REASON): (2, ["x.json", "y.json"]),
        (".0", selection.UNKNOWN_REASON): (1, ["part.0"]),
        ("other", "of further kinds"): (5, ["part.1", "part.2", "part.3"]),
    }


def test_unread_files_in_manifest_and_summary(records, tmp_path, tokenizer_file):
    files(records, "d.json", "e.json", "f.json", "g.json", "h.jsonl.xz", "LICENSE", "notes.txt")
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file))
    assert load_manifest(tmp_path / "out") == manifest
    assert manifest.provenance["not_read"][0] == {
        "suffix": ".json",
        "reason": "unsupported format",
        "files": 4,
        "examples": ["d.json", "e.json", "f.json"],
    }
    assert [line for line in format_summary(manifest, "").splitlines() if line.startswith("not read")] == [
        "not read: 4 .json files (unsupported format): for example d.json, e.json, f.json",
        "not read: 1 .txt file (text beside files of records): notes.txt",
        "not read: 1 file without suffix (unsupported format): LICENSE",
        "not read: 1 .jsonl.xz file (unsupported format): h.jsonl.xz",
    ]


@pytest.mark.parametrize("content", ["", " \n\t"])
def test_text_file_without_text(tmp_path, content):
    files(tmp_path, "law/a.txt", "law/b.txt")
    files(tmp_path, "law/empty.txt", content=content)
    corpus = open_files(tmp_path)
    with pytest.raises(UserError, match=r"law/empty\.txt: no text; repair it or pass --on-error skip$"):
        list(corpus.documents(Problems()))
    problems = Problems("skip")
    assert [item.id for item in corpus.documents(problems)] == ["law/a.txt", "law/b.txt"]
    assert problems.counts == {(str(tmp_path / "law/empty.txt"), "no text"): 1}


def test_split_folders_below_the_top_are_rejected(tmp_path, tokenizer_file):
    for split in ("train", "test"):
        write_jsonl(tmp_path / "raw/Slim" / split / "x.jsonl", lines(["C4", "ArXiv"], 20, split))
    root = tmp_path / "raw"
    with pytest.raises(UserError) as caught:
        prepare(options(root, tmp_path / "out", tokenizer_file))
    assert str(caught.value) == (
        f"--input: {root} has train, test below {root}/Slim, but split folders must be at the top level; "
        f"give {root}/Slim as --input"
    )
    assert open_files(root / "Slim").folders == {"train", "test"}
    assert open_files(root / "Slim/test").folders == frozenset()
    write_jsonl(root / "b/c/validation/x.jsonl", [])
    message = f"--input: {root} has train, validation, test below {root}/Slim, {root}/b/c, but split folders must be"
    with pytest.raises(
        UserError, match=rf"^{re.escape(message)} .*; give one of .* or put the folders train, .* at the top level$"
    ):
        open_files(root)


def test_split_names_of_other_folders(tmp_path):
    """Split names do not apply to text files, whose folders are domains, nor within the folder of a split."""
    files(tmp_path / "texts", "code/test/x.py", "code/train/y.py", content=text("x"))
    assert open_files(tmp_path / "texts").units == 2
    files(tmp_path / "split", "train/test/a.jsonl", "train/b.jsonl")
    assert [file.source for file in open_files(tmp_path / "split").files] == ["train/b.jsonl", "train/test/a.jsonl"]
    files(tmp_path / "named", "a.jsonl", "b/train.jsonl")
    assert open_files(tmp_path / "named").units == 2
