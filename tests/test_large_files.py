"""Untrusted files: oversized or endless ones are refused at once."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.manifest import TokenizerEntry
from data_prep.tokenization.folders import open_folder
from data_prep.tokenization.rwkv_world import RwkvTokenizer
from data_prep.tokenization.tiktoken_files import TiktokenTokenizer
from data_prep.tokenization.tokenizer import load_tokenizer
from megatron_ext.analysis.suites import _read_picture
from megatron_ext.checkpoint.contents import FileDigest
from megatron_ext.checkpoint.folder import LATEST, CheckpointFolder
from megatron_ext.config.deepspeed import _read as read_deepspeed
from megatron_ext.conversion.core.output_folder import README, _is_conversion_file
from megatron_ext.conversion.core.source import SourceOptions
from megatron_ext.conversion.deepspeed import universal
from megatron_ext.conversion.huggingface.safetensors_files import INDEX, SafetensorsTensors
from megatron_ext.conversion.megatron import gpt
from megatron_ext.data.skipped_shards import SKIPPED, copy_skipped
from megatron_ext.evaluation.fewshot.published import read_rows
from megatron_ext.runs.tokenizer import store_tokenizer
from megatron_ext.runs.tokenizer_files import COMPANIONS, TOKENIZER, find_tokenizer, read_json
from megatron_ext.training.loggers.jsonl import read_records
from megatron_ext.utils.atomic_files import MAX_READ_BYTES, read_regular
from megatron_ext.utils.errors import UserError

ROOT = Path(__file__).parents[1]
RWKV = TokenizerEntry("x", "", 9, "e", 1, "rwkv")

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "DeepSpeed's newest": (universal.NEWEST, lambda folder: universal.open_folder(folder, SourceOptions())),
    "Megatron's newest": (gpt.NEWEST, lambda folder: gpt.open_folder(folder, SourceOptions())),
    "our newest": (LATEST, lambda folder: CheckpointFolder(folder).latest()),
    "index": (INDEX, SafetensorsTensors),
    "tokenizer": (TOKENIZER, find_tokenizer),
    "tokenizer for prepare": (TOKENIZER, lambda folder: load_tokenizer(folder / TOKENIZER)),
    "beside a tokenizer": (COMPANIONS[0], lambda folder: read_json(folder / COMPANIONS[0])),
    "configuration of a tokenizer": ("tokenizer_config.json", open_folder),
    "ranks": ("a.tiktoken", lambda folder: TiktokenTokenizer.open(str(folder / "a.tiktoken"), "x")),
    "RWKV's": ("vocab.txt", lambda folder: RwkvTokenizer(folder / "vocab.txt")),
    "DeepSpeed's": ("ds.json", lambda folder: read_deepspeed(folder / "ds.json")),
    "rows": ("rows.jsonl", lambda folder: read_rows("hellaswag", folder / "rows.jsonl")),
    "picture": ("a.png", lambda folder: _read_picture(folder / "a.png")),
    "records": ("metrics.jsonl", lambda folder: list(read_records(folder / "metrics.jsonl"))),
    "skipped": (SKIPPED, lambda folder: copy_skipped(folder, folder, 1)),
    "kept tokenizer": ("vocab.txt", lambda folder: store_tokenizer(folder / "vocab.txt", RWKV, folder)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_a_stranger_is_not_read_without_end(tmp_path: Path, reader: str) -> None:
    """A sparse file of 2 TiB takes no disk space, but does not fit into memory."""
    name, read = READERS[reader]
    with (tmp_path / name).open("wb") as file:
        os.truncate(file.fileno(), 2 << 40)
    with pytest.raises((UserError, OSError)) as error:
        read(tmp_path)
    assert "bytes" in str(error.value) or "cannot be read" in str(error.value)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with contextlib.suppress(UserError, OSError):  # a reader may skip what is not a regular file
        read(tmp_path)


def test_what_has_no_size_is_read_up_to_the_limit(tmp_path: Path) -> None:
    assert read_regular(Path("/proc/self/status")).startswith(b"Name:")
    with pytest.raises(OSError, match="has more than 4 bytes"):
        read_regular(Path("/proc/self/status"), 4)
    (tmp_path / "exact").write_bytes(b"1234")
    assert read_regular(tmp_path / "exact", 4) == b"1234"
    assert MAX_READ_BYTES >= 1 << 30


def test_a_file_of_another_size_is_not_summed(tmp_path: Path) -> None:
    with (tmp_path / "shard").open("wb") as file:
        os.truncate(file.fileno(), 2 << 40)
    with pytest.raises(UserError, match="differs from what was written"):
        universal._check_files(tmp_path, {"shard": FileDigest(5, "0")})


def test_a_newest_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    (tmp_path / LATEST).symlink_to("/dev/zero")
    CheckpointFolder(tmp_path).set_latest(4)
    assert (tmp_path / LATEST).read_bytes() == b"step_4\n"


def test_of_a_readme_the_beginning_is_read(tmp_path: Path) -> None:
    with (tmp_path / README).open("wb") as file:
        os.truncate(file.fileno(), 2 << 40)
    assert not _is_conversion_file(tmp_path / README)


OWN = {
    "megatron_ext/planning/rates.py": "part of the package",
    "megatron_ext/evaluation/retrieval/words.py": "part of the package",
    "megatron_ext/analysis/page.py": "part of the package",
    "megatron_ext/launch/preflight/checks.py": "code that was imported",
    "megatron_ext/launch/job.py": "part of the package",
    "megatron_ext/run_folder/process_identity.py": "/proc",
    "megatron_ext/utils/error_reporting.py": "/proc",
    "kernels/name_conflict.py": "installed distributions",
    "megatron_ext/training/trial.py": "written by this call",
    "megatron_ext/checkpoint/index.py": "written by this call",
    "megatron_ext/commands/launch.py": "written by this call",
    "megatron_ext/launch/local.py": "written by this call",
    "megatron_ext/commands/generate.py": "named on the command line, and may be a pipe",
    "data_prep/running/slurm_jobs.py": "written by calls for the same output",
}
"""Modules that use the unbounded read_text or read_bytes, with the origin of the files they read."""


def test_whatever_else_is_read_whole_is_bounded() -> None:
    found = set()
    for place in ("megatron_ext", "data_prep", "kernels"):
        for path in (ROOT / place).rglob("*.py"):
            if re.search(r"\.read_(text|bytes)\(", path.read_text()):
                found.add(path.relative_to(ROOT).as_posix())
    found = {path for path in found if not path.startswith("megatron_ext/bench/")}
    assert found == OWN.keys(), "read it by files.read_regular, or say here why it cannot be a stranger's"
