"""Files that name other files: readers refuse names that lead out of the folder, and touch nothing there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from data_prep.manifest import TokenizerEntry
from data_prep.output.shards import DomainWriter
from data_prep.tokenization.vocabularies import check_vocabulary
from megatron_ext.analysis.output import replace_files
from megatron_ext.checkpoint.folder import LATEST, RECORD, CheckpointFolder
from megatron_ext.conversion.core.source import SourceOptions
from megatron_ext.conversion.deepspeed import universal
from megatron_ext.conversion.huggingface.safetensors_files import INDEX, SafetensorsTensors
from megatron_ext.conversion.megatron import gpt
from megatron_ext.launch.array import Array
from megatron_ext.launch.job import Job
from megatron_ext.launch.status import run_folders
from megatron_ext.runs.tokenizer import ENTRY, store_tokenizer, stored_tokenizer
from megatron_ext.utils.errors import UserError

HOSTILE = ("../outside/x", "/outside/x", "a/../../outside/x", "", "a\x1b[2Jb", "a\\..\\x")


def checkpoint(folder: Path, name: str) -> None:
    record = {"progress": {}, "identity": {}, "generators": [], "files": {name: {"size": 0, "xxh3_128": ""}}}
    (folder / "step_1").mkdir()
    (folder / "step_1" / RECORD).write_text(json.dumps(record))
    CheckpointFolder(folder).read_record(1)


def safetensors(folder: Path, name: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
    SafetensorsTensors(folder)


def megatron(folder: Path, name: str) -> None:
    (folder / gpt.NEWEST).write_text(name)
    gpt.open_folder(folder, SourceOptions())


def deepspeed(folder: Path, name: str) -> None:
    (folder / universal.NEWEST).write_text(name)
    universal.open_folder(folder, SourceOptions())


def description(folder: Path, name: str) -> None:
    universal._check_files(folder, {name: None})  # type: ignore[dict-item]


def saved_tokenizer(folder: Path, name: str) -> None:
    (folder / ENTRY).write_text(json.dumps({**vars(TokenizerEntry("x", "", 9, "e", 1, "rwkv")), "file": name}))
    stored_tokenizer(folder)


def sweep(folder: Path, name: str) -> None:
    (folder / "sweep.json").write_text(json.dumps({"runs": [name]}))
    list(run_folders([folder]))


def array(folder: Path, name: str) -> None:
    own = folder / "launch" / "arrays" / "1"
    own.mkdir(parents=True)
    (own / "jobs.json").write_text(json.dumps([name]))
    Array(own).write_number("5")


def domain(folder: Path, name: str) -> None:
    DomainWriter(folder, "train", name, 1)


def report(folder: Path, name: str) -> None:
    (folder / "record.json").write_text(json.dumps({"files": [name]}))
    replace_files(folder, {}, "record.json", re.compile(r"(?s).*"))


READERS: tuple[Callable[[Path, str], None], ...] = (
    *(checkpoint, safetensors, megatron, deepspeed, description, saved_tokenizer, sweep, array, domain, report),
)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_refused(tmp_path, read, name):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    (outside / "x").mkdir(parents=True)
    with pytest.raises(UserError, match=r"which (is empty|is not a relative|leads out|contains)") as caught:
        read(folder, name)
    assert str(caught.value).isprintable()
    assert [path.name for path in outside.rglob("*")] == ["x"]


def test_jobs_outside_the_sweep_get_no_number(tmp_path):
    """Records have absolute paths. Those of the sweep's own runs are accepted, also through a link to the sweep."""
    runs = tmp_path / "runs"
    own, job = runs / "launch" / "arrays" / "1", runs / "a" / "launch" / "1"
    for folder in (own, job):
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(runs)
    (own / "jobs.json").write_text(json.dumps([str(job)]))
    Array(tmp_path / "link" / "launch" / "arrays" / "1").write_number("5")
    assert Job(job).number == "5_0"
    (runs / "b").symlink_to(tmp_path)
    (own / "jobs.json").write_text(json.dumps([str(runs / "b")]))
    with pytest.raises(UserError, match="is not a relative path"):
        Array(own).write_number("5")
    assert not (tmp_path / "job_id").exists()


@pytest.mark.parametrize("text", ["../../x", "-u root", "5; reboot", "5\n6", "5_", "", "\u0665", "x" * 10_000])
def test_job_number_must_be_a_number(tmp_path, text):
    (tmp_path / "job_id").write_text(text)
    for ask in (lambda: Job(tmp_path).number, lambda: Job(tmp_path).log):
        with pytest.raises(UserError, match="is not a Slurm job number") as caught:
            ask()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("text", ["step_" + "9" * 5000, "step_\u0665", "../step_5", "step_", "step_5x", "\xff"])
def test_latest_file_must_name_a_step(tmp_path, text):
    (tmp_path / LATEST).write_text(text, encoding="latin-1" if text == "\xff" else "utf-8")
    with pytest.raises(UserError, match="is not a checkpoint; "):
        CheckpointFolder(tmp_path).latest()


def test_stored_tokenizer_does_not_overwrite_other_files(tmp_path):
    """The manifest's file name of a tokenizer may collide with a file of the run."""
    (tmp_path / "config.yaml").write_text("kept")
    given = tmp_path / "given.txt"
    given.write_text("".join(f"{number} {bytes([number - 1])!r} 1\n" for number in range(1, 257)))
    store_tokenizer(given, TokenizerEntry("config.yaml", "", 257, "<|endoftext|>", 0, "rwkv"), tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "kept"
    tokenizer = stored_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [98, 99]


def test_a_vocabulary_smaller_than_its_tokenizer(tmp_path):
    vocab: dict[str, Any] = {"a": 0, "b": 1, "<|endoftext|>": 2}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(tmp_path / "tokenizer.json"))
    check_vocabulary(tmp_path / "tokenizer.json", TokenizerEntry("t", "", 3, "<|endoftext|>", 2))
    with pytest.raises(UserError, match=r"tokenizer\.json: has ids up to 2, and .*vocab_size is 2; "):
        check_vocabulary(tmp_path / "tokenizer.json", TokenizerEntry("t", "", 2, "<|endoftext|>", 1))


def test_links_of_downloaded_models_are_allowed(tmp_path):
    """In the cache of huggingface_hub, files named by the index are links to files beside the folder."""
    from safetensors.numpy import save_file

    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    save_file({"weight": np.arange(3, dtype=np.float32)}, tmp_path / "blob")
    (snapshot / "model-1.safetensors").symlink_to(tmp_path / "blob")
    (snapshot / INDEX).write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors"}}))
    assert SafetensorsTensors(snapshot).read("weight").tolist() == [0.0, 1.0, 2.0]
