import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import webdataset
from prep_fakes import UNFILTERED, lines, options, record, text, write_jsonl
from tokenizers import Tokenizer

from data_prep import prepare as module
from data_prep.manifest import load_manifest
from data_prep.output import merging, shards, writing
from data_prep.prepare import prepare
from data_prep.stages import Filtering
from data_prep.tokenization.tokenizer import JsonTokenizer
from megatron_ext.utils.errors import UserError


def samples(root: Path, split: str, domain: str) -> list[dict]:
    """Read documents back with only webdataset's reader and decoder."""
    files = sorted(str(path) for path in (root / split / domain).glob("*.tar"))
    return [item for file in files for item in webdataset.WebDataset(file, shardshuffle=False).decode()]


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_shards_contain_the_documents(records, tmp_path, tokenizer_file):
    out = tmp_path / "out"
    manifest = prepare(options(records, out, tokenizer_file))
    assert load_manifest(out) == manifest
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    given = defaultdict(list)
    for domain in ("C4", "CommonCrawl", "ArXiv"):
        given[domain] += [text(f"{domain}{i}", 5 + i % 60) for i in range(20)]
        if domain != "CommonCrawl":
            given[domain] += [text(f"more {domain}{i}", 5 + i % 60) for i in range(15)]
    found = defaultdict(list)
    for entry in manifest.domains:
        read = samples(out, entry.split, entry.domain)
        assert len(read) == entry.documents == sum(shard.documents for shard in entry.shards)
        assert sum(len(item["tokens.npy"]) for item in read) == entry.tokens
        texts = [tokenizer.decode(item["tokens.npy"][:-1].tolist()) for item in read]
        for item, content in zip(read, texts, strict=True):
            assert item["tokens.npy"].dtype == np.uint16
            assert item["tokens.npy"].tolist() == [*tokenizer.encode(content).ids, manifest.tokenizer.eos_id]
            facts = {"domain": entry.domain, "characters": len(content), "tokens": len(item["tokens.npy"])}
            assert facts.items() <= item["json"].items()
            assert item["json"]["id"].startswith(item["json"]["source"] + ":")
        assert entry.characters == sum(map(len, texts))
        assert entry.bytes == sum(len(content.encode()) for content in texts)
        assert [item["__key__"] for item in read] == [f"00000-{i:09d}" for i in range(len(read))]
        found[entry.domain] += texts
    assert {name: sorted(texts) for name, texts in found.items()} == {name: sorted(t) for name, t in given.items()}
    assert {(entry.split, entry.domain) for entry in manifest.domains} == {
        *(("train", name) for name in ("C4", "CommonCrawl")),
        *(("validation", name) for name in ("C4", "CommonCrawl")),
        ("test", "ArXiv"),
    }


def test_index_points_at_the_tokens(records, tmp_path, tokenizer_file):
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file, filtering=UNFILTERED))
    entry = next(entry for entry in manifest.domains if entry.split == "train")
    assert len(entry.shards) > 1
    for shard in entry.shards:
        path = tmp_path / "out" / shard.file
        with tarfile.open(path) as tar:
            arrays = [(item, tar.extractfile(item)) for item in tar if item.name.endswith(".tokens.npy")]
            loaded = [(item.offset_data + item.size, np.load(io.BytesIO(file.read()))) for item, file in arrays]
        index = np.load(tmp_path / "out" / shard.index)
        assert index.dtype == np.int64
        assert index.tolist() == [[end - array.nbytes, len(array)] for end, array in loaded]
        content = path.read_bytes()
        for (offset, count), (_, array) in zip(index, loaded, strict=True):
            assert np.array_equal(np.frombuffer(content, "<u2", count, offset), array)


def tokens_by_id(root: Path, split: str, domain: str) -> dict[str, list[int]]:
    return {item["json"]["id"]: item["tokens.npy"].tolist() for item in samples(root, split, domain)}


def test_tokens_are_independent_of_shards_and_tasks(records, tmp_path, tokenizer_file):
    write_jsonl(records / "c.jsonl", lines(["C4", "ArXiv"], 10, "more "))  # copies of documents in b.jsonl
    changes = {"a": {}, "c": {"shard_tokens": 10**9}, "d": {"tasks": 1}}
    usual = {"tasks": 3, "shard_tokens": 300, "filtering": Filtering(overlap=None)}
    for name, change in changes.items():
        prepare(options(records, tmp_path / name, tokenizer_file, **{**usual, **change}))
    first = tokens_by_id(tmp_path / "a", "train", "C4")
    assert first == tokens_by_id(tmp_path / "c", "train", "C4") == tokens_by_id(tmp_path / "d", "train", "C4")
    assert len(first) == len({tuple(tokens) for tokens in first.values()})
    assert [load_manifest(tmp_path / name).duplicates for name in changes] == [20] * 3
    shards_of = {name: len(list((tmp_path / name / "train/C4").glob("*.tar"))) for name in changes}
    assert shards_of["c"] <= 3 < shards_of["a"]


def test_folders_determine_the_split(tmp_path, tokenizer_file):
    for folder in ("train", "validation", "test"):
        write_jsonl(tmp_path / "raw" / folder / "x.jsonl.zst", lines(["C4", "ArXiv"], 6, folder))
    chosen = {"train_domains": ["c4"], "filtering": UNFILTERED}
    manifest = prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **chosen))
    sources = {
        (entry.split, entry.domain): {
            item["json"]["source"] for item in samples(tmp_path / "out", entry.split, entry.domain)
        }
        for entry in manifest.domains
    }
    assert sources == {
        ("train", "C4"): {"train/x.jsonl.zst"},
        ("validation", "C4"): {"validation/x.jsonl.zst"},
        ("test", "ArXiv"): {"test/x.jsonl.zst"},
        ("test", "C4"): {"test/x.jsonl.zst"},
    }
    assert all(entry.documents == 6 for entry in manifest.domains)


def test_equal_texts_are_kept_once(tmp_path, tokenizer_file):
    content = lines(["C4"], 30) * 2 + lines(["ArXiv"], 5) + [record("ArXiv", text("C43", 8))]
    source = write_jsonl(tmp_path / "x.jsonl", content)
    chosen = {"train_domains": ["C4"], "filtering": Filtering(overlap=None)}
    manifest = prepare(options(source, tmp_path / "out", tokenizer_file, **chosen))
    counts = {entry.split: entry.documents for entry in manifest.domains}
    assert manifest.duplicates == 31
    assert counts["train"] + counts["validation"] == 29
    assert counts["test"] == 6  # the copy of a training document stays a test document


def test_validation_fraction(tmp_path, tokenizer_file):
    source = write_jsonl(tmp_path / "x.jsonl", [record("C4", f"{i}") for i in range(3000)])
    chosen = {
        "train_domains": ["C4"],
        "test_domains": [],
        "validation_fraction": 0.1,
        "shard_tokens": 10**6,
        "filtering": UNFILTERED,
    }
    manifest = prepare(options(source, tmp_path / "out", tokenizer_file, **chosen))
    held_out = {entry.split: entry.documents for entry in manifest.domains}["validation"]
    assert abs(held_out - 300) < 5 * (3000 * 0.1 * 0.9) ** 0.5


def test_large_vocabulary_is_stored_as_uint32(records, tmp_path, tokenizer_file):
    content = json.loads(tokenizer_file.read_bytes())
    vocabulary = content["model"]["vocab"]
    size = max(vocabulary.values(), default=-1) + 1
    vocabulary |= {f"never-{number}-seen": number for number in range(size, 65536)}
    (tmp_path / "large.json").write_text(json.dumps(content))
    manifest = prepare(options(records, tmp_path / "out", tmp_path / "large.json", filtering=UNFILTERED))
    assert (manifest.dtype, manifest.tokenizer.vocab_size) == ("uint32", 65536)
    assert samples(tmp_path / "out", "test", "ArXiv")[0]["tokens.npy"].dtype == np.uint32


def test_tokenizer_is_trained_on_the_train_split_alone(records, tmp_path):
    trained = []
    for name in ("a", "b"):
        prepare(options(records, tmp_path / name, "train", vocab_size=300, filtering=UNFILTERED))
        trained.append((tmp_path / name / "tokenizer.json").read_bytes())
        write_jsonl(records / "c.jsonl", [record("ArXiv", "zzzzqqqq " * 500), record("Book", "xxxxjjjj " * 500)])
    assert trained[0] == trained[1]


def test_malformed_records_stop_or_are_reported(records, tmp_path, tokenizer_file):
    bad = write_jsonl(records / "bad.jsonl", ['{"text": 1}', "{", "{"])
    with pytest.raises(UserError, match=rf"^{re.escape(str(bad))}:1: no text \(`text` is a number\); "):
        prepare(options(records, tmp_path / "out", tokenizer_file, filtering=UNFILTERED))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file, on_error="skip", filtering=UNFILTERED))
    assert [(item.file, item.reason, item.records) for item in manifest.skipped] == [
        (str(bad), "no text", 1),
        (str(bad), "not JSON", 2),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_domains": ["C4", "Law"]},
            "--train-domains: unknown domain Law; choose from the domains of the input: ArXiv, Book, C4, CommonCrawl",
        ),
        ({"test_domains": ["ArXiv", "Law"]}, "--test-domains: unknown domain Law; choose from the domains of the"),
        (
            {"train_domains": ["RedPajamaC4", "Book"], "test_domains": ["c4"]},
            "--test-domains: RedPajamaC4 is both a training domain and a test domain; remove it from ",
        ),
        ({"train_domains": []}, "--train-domains: no domain is given; "),
        ({"train_domains": ["../x"]}, "--train-domains/--test-domains: '../x' is not a valid folder name; "),
        ({"tokenizer": "absent.json"}, "--tokenizer: absent.json is not a file; "),
        ({"eos_token": "<end>"}, "--eos-token: <end> is not in the tokenizer's vocabulary; "),
        ({"validation_fraction": 1.0}, "--validation-fraction: 1.0 is not in [0, 1); "),
        ({"shard_tokens": 0}, "--shard-tokens: 0 is not positive; "),
        ({"input": "absent"}, "--input: absent does not exist; "),
    ],
)
def test_options_at_fault(records, tmp_path, tokenizer_file, changes, message):
    with pytest.raises(UserError) as caught:
        prepare(options(records, tmp_path / "out", tokenizer_file, **changes))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_domain_that_is_in_no_used_folder(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "raw/train/x.jsonl", lines(["C4", "ArXiv"], 3))
    write_jsonl(tmp_path / "raw/test/x.jsonl", lines(["Book"], 3))
    chosen = {"train_domains": ["C4"], "filtering": UNFILTERED}
    with pytest.raises(UserError, match=r"^--test-domains: ArXiv has no document in the test split; "):
        prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **chosen))
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_touched(records, tmp_path, tokenizer_file):
    out, foreign = tmp_path / "out", tmp_path / "other.partial"
    for folder in (out, foreign):
        folder.mkdir()
        (folder / "precious").write_text("mine")
    with pytest.raises(UserError, match=rf"^{re.escape(str(out))}: already exists and is not empty; "):
        prepare(options(records, out, tokenizer_file))
    with pytest.raises(UserError, match=rf"^{re.escape(str(foreign))}: exists, but was not created "):
        prepare(options(records, tmp_path / "other", tokenizer_file))
    assert everything(out) == everything(foreign) == {"precious": b"mine"}
    (tmp_path / "empty").mkdir()
    prepare(options(records, tmp_path / "empty", tokenizer_file, filtering=UNFILTERED))  # an empty folder is replaced


def test_full_disk_keeps_the_work(records, tmp_path, tokenizer_file, monkeypatch):
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shards, "fsync_path", full)
        with pytest.raises(
            UserError, match=r"\.tar: cannot be read or written \(No space left on device\); free space"
        ):
            prepare(options(records, tmp_path / "out", tokenizer_file, filtering=UNFILTERED))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "raw"]
    prepare(options(records, tmp_path / "out", tokenizer_file, filtering=UNFILTERED))
    prepare(options(records, tmp_path / "whole", tokenizer_file, filtering=UNFILTERED))
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


def test_interrupted_while_shards_are_moved(records, tmp_path, tokenizer_file, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(merging, "save_manifest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(records, tmp_path / "out", "train", vocab_size=300, tasks=2, filtering=UNFILTERED))
    assert list((tmp_path / "out.partial").rglob("*.tar"))
    assert not (tmp_path / "out").exists()
    prepare(options(records, tmp_path / "out", "train", vocab_size=300, tasks=2, filtering=UNFILTERED))
    prepare(options(records, tmp_path / "whole", "train", vocab_size=300, tasks=2, filtering=UNFILTERED))
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 800}, "was started with --shard-tokens 700, not 800; give the same value, or remove "),
        ({"train_domains": ["C4"]}, "was started with --train-domains C4,CommonCrawl, not C4; "),
        ("input", "was started with input files of digest "),
        ("tokenizer", "tokenizer.json of sha256 "),
    ],
)
def test_stopped_work_is_not_gone_on_with_otherwise(records, tmp_path, tokenizer_file, monkeypatch, change, message):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    mine = tmp_path / "tokenizer.json"
    mine.write_bytes(tokenizer_file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(writing, "load_saved_tokenizer", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(records, tmp_path / "out", mine, filtering=UNFILTERED))
    if change == "input":
        write_jsonl(records / "b.jsonl", lines(["C4"], 40))
    elif change == "tokenizer":
        mine.write_text(mine.read_text() + " ")
    before = everything(tmp_path / "out.partial")
    changes = change if isinstance(change, dict) else {}
    with pytest.raises(UserError) as caught:
        prepare(options(records, tmp_path / "out", mine, filtering=UNFILTERED, **changes))
    assert str(caught.value).startswith(f"{tmp_path / 'out.partial'}: ")
    assert message in str(caught.value)
    assert everything(tmp_path / "out.partial") == before


HANGS = """
import sys, time
sys.path[:0] = sys.argv[4:]
from pathlib import Path
from prep_fakes import options
from data_prep import prepare as module
from data_prep.output import writing
add, calls = writing.DomainWriter.add, []
def hang(*arguments):
    calls.append(arguments)
    if len(calls) == 70:  # in the midst of the second task
        Path(sys.argv[2] + ".reached").touch()
        time.sleep(600)
    add(*arguments)
writing.DomainWriter.add = hang
module.prepare(options(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), tasks=2))
"""


def test_killed_half_way_leaves_no_manifest_and_the_next_call_goes_on(records, tmp_path, tokenizer_file, monkeypatch):
    out, reached = tmp_path / "out", tmp_path / "out.reached"
    paths = [str(Path(__file__).parent), str(Path(module.__file__).parents[1])]
    arguments = [str(records), str(out), str(tokenizer_file), *paths]
    process = subprocess.Popen([sys.executable, "-c", HANGS, *arguments])
    try:
        deadline = time.monotonic() + 240
        while not reached.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert reached.exists()
        with pytest.raises(UserError, match=r"out\.partial: is being written by another `selectron prepare`; "):
            prepare(options(records, out, tokenizer_file, tasks=2))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not out.exists()
    partial = tmp_path / "out.partial"
    assert list(partial.rglob("*.tar"))
    assert not list(partial.rglob("manifest.json"))

    encoded: list[str] = []
    encode = JsonTokenizer.encode_batch
    with monkeypatch.context() as patch:
        patch.setattr(JsonTokenizer, "encode_batch", lambda self, texts: encoded.extend(texts) or encode(self, texts))
        manifest = prepare(options(records, out, tokenizer_file, tasks=2))
    assert len(encoded) == 30  # the second file's documents without its domain Book
    assert load_manifest(out) == manifest
    assert not partial.exists()
    prepare(options(records, tmp_path / "whole", tokenizer_file, tasks=2))
    assert everything(out) == everything(tmp_path / "whole")
