"""Hostile checkpoints: every command that reads checkpoints refuses code in any of their files."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import hostile
import pytest
from corpora import prepared
from left_behind import release_models
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_ext.checkpoint.contents import compute_digest
from megatron_ext.cli import main
from megatron_ext.parallel.groups import destroy_process_groups

CONFIG = """
data: {{path: {data}, seq_length: 32}}
model: {{pattern: attention, hidden_size: 16, num_attention_heads: 2, max_position_embeddings: 32}}
training: {{steps: 1, global_batch_size: 1, micro_batch_size: 1, precision: fp32}}
optimizer: {{lr: 1e-3, schedule: constant, warmup_steps: 0}}
run: {{dir: {runs}, name: run, device: cpu}}
"""

COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "inspect": lambda run, config: ["inspect", str(run)],
    "convert": lambda run, config: ["convert", str(run), str(run.parent / "out"), "--to", "hf"],
    "generate": lambda run, config: ["generate", str(run), "--prompt", "a", "--max-tokens", "1"],
    "evaluate": lambda run, config: ["evaluate", str(run)],
    "branch_from": lambda run, config: [
        *("train", str(config), f"run.dir={run.parent}", "run.name=branch", "training.steps=2"),
        f"run.branch_from={run}/checkpoints/step_1",
    ],
    "resume": lambda run, config: ["train", str(config), "--resume", f"run.dir={run.parent}", "training.steps=2"],
}


def _main(arguments: list[str]) -> int:
    with patch.dict(os.environ):  # commands set the rank there
        try:
            return main(arguments)
        except SystemExit as stop:
            return int(stop.code or 0)
        finally:
            destroy_process_groups()  # a real command would end its process here
            release_models()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folder of a run, and its configuration."""
    folder = tmp_path_factory.mktemp("trained")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(data=prepared(folder, documents=20), runs=folder))
    assert _main(["train", str(config)]) == 0
    return folder / "run", config


def _replace_index(step: Path, program: bytes) -> Path:
    (step / ".metadata").write_bytes(hostile.whole(program))
    return step / ".metadata"


def _replace_common(step: Path, program: bytes) -> Path:
    (step / "common.pt").write_bytes(hostile.torch_file(program))
    return step / "common.pt"


def _replace_tensor(step: Path, program: bytes) -> Path:
    """Replace a weight by an object, which torch unpickles without restriction."""
    return _replace_entry(step, program, "embedding.word_embeddings.weight", is_object=False)


def _replace_generators(step: Path, program: bytes) -> Path:
    """Replace the states of the random generators, which are not tensors."""
    return _replace_entry(step, program, "generators/", is_object=True)


def _replace_entry(step: Path, program: bytes, prefix: str, *, is_object: bool) -> Path:
    content = hostile.torch_file(program)
    (step / "hostile.distcp").write_bytes(content)
    metadata = pickle.loads((step / ".metadata").read_bytes())
    (key,) = (key for key in metadata.state_dict_metadata if key.startswith(prefix))
    assert isinstance(metadata.state_dict_metadata[key], BytesStorageMetadata) == is_object
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    assert isinstance(index, MetadataIndex)
    metadata.storage_data[index] = _StorageInfo("hostile.distcp", 0, len(content))
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    return step / "hostile.distcp"


def _update_record(step: Path) -> None:
    """Update the checksums in the record of a checkpoint, as an attacker could."""
    record = json.loads((step / "checkpoint.json").read_text())
    names = [path.name for path in step.iterdir() if path.name != "checkpoint.json"]
    record["files"] = {name: asdict(compute_digest(step / name)) for name in sorted(names)}
    (step / "checkpoint.json").write_text(json.dumps(record))


READ_BY = {
    _replace_index: set(COMMANDS),
    _replace_common: set(COMMANDS) - {"inspect"},
    _replace_tensor: set(COMMANDS) - {"inspect"},
    _replace_generators: {"resume", "branch_from"},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_code(
    command: str, trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained[0], tmp_path / "run")
    step, mark = run / "checkpoints" / "step_1", tmp_path / "mark"
    backup = shutil.copytree(step, tmp_path / "backup")
    for replace, commands in READ_BY.items():
        if command not in commands:
            continue
        programs = list(hostile.HARMFUL.items())
        # `inspect` reads the index without torch, other commands read it with torch. One of each tries all programs.
        reads_all = replace is _replace_index and command in ("inspect", "convert")
        for kind, program in programs if reads_all else programs[:2]:
            mark.write_text("precious")
            file = replace(step, program(mark))
            _update_record(step)
            capsys.readouterr()
            assert _main(COMMANDS[command](run, trained[1])) == 2, kind
            lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
            assert len(lines) == 1, (kind, lines)
            assert lines[0].startswith(f"selectron: error: {file}: cannot be read: it "), (kind, lines)
            assert mark.read_text() == "precious", kind
            shutil.rmtree(step)
            shutil.copytree(backup, step)


SIZES = [
    ("hidden_size", 1 << 40),
    ("hidden_size", 1 << 20),
    ("vocab_size_multiple", 10**15),
    ("ffn_hidden_size", 10**13),
    ("ffn_hidden_size", 10**30),
]


@pytest.mark.parametrize(("field", "value"), SIZES)
@pytest.mark.parametrize("command", ["convert", "generate", "evaluate"])
def test_sizes_that_contradict_the_tensors_are_refused(
    command: str, field: str, value: int, trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained[0], tmp_path / "run")
    if command == "convert":
        file = run / "checkpoints" / "step_1" / "checkpoint.json"
        record = json.loads(file.read_text())
        record["identity"][f"model.{field}"] = value
        file.write_text(json.dumps(record))
    else:
        file = run / "config.yaml"
        text, num_replaced = re.subn(rf"(?m)^  {field}: .*$", f"  {field}: {value}", file.read_text())
        assert num_replaced == 1
        file.write_text(text)
    capsys.readouterr()
    found = _main(COMMANDS[command](run, trained[1]))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error: " in line)
    assert found == 2
    assert not (tmp_path / "out").exists()
    assert re.search(r" makes | (has|the) shape \[|describes a tensor that is too large", line), line
