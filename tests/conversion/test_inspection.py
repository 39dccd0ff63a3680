"""Command `selectron inspect` without torch: same output as for a checkpoint that it opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from imported import imported_by

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.cli import main
from megatron_ext.commands.inspect import describe
from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core import selectron_run
from megatron_ext.conversion.core.inspection import inspect_folder
from megatron_ext.conversion.core.opening import open_source
from megatron_ext.conversion.core.our_model import expected_tensors
from megatron_ext.conversion.core.saved_model import saved_model
from megatron_ext.conversion.core.source import SourceOptions
from megatron_ext.conversion.core.tensors import LazyTensors
from megatron_ext.conversion.huggingface import folder as hugging_face
from megatron_ext.conversion.huggingface.families import FAMILIES
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.mixers.core.settings import SETTINGS

RWKV = ("rwkv6", "rwkv7")
NO_OPTIONS = SourceOptions()


def model(*mixers: str, **fields: Any) -> Any:
    """Return a small model with one layer per mixer, with default settings."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "head_dim": 16, "ffn_hidden_size": 64}
    plain = ModelConfig(pattern=",".join(mixers), max_position_embeddings=64, **{**sizes, **fields})
    identity = {f"model.{name}": value for name, value in vars(plain).items() if not name.startswith("__")}
    identity |= {f"mixers.{name}.{key}": v for name in mixers for key, v in vars(SETTINGS[name]()).items()}
    return saved_model({**identity, "data.vocab_size": 50, "data.seq_length": 64}, "here")


def tensors_of(saved: Any) -> LazyTensors:
    infos = expected_tensors(saved)
    return LazyTensors(infos, lambda key: torch.zeros(infos[key].shape, dtype=infos[key].dtype))


def written_run(folder: Path, saved: Any) -> Path:
    folder.mkdir()
    selectron_run.write_run(saved, tensors_of(saved), "fp32", Progress(3, 4, 5), folder, folder.name)
    return folder


def written_model(folder: Path, saved: Any, architecture: str) -> Path:
    folder.mkdir()
    family = FAMILIES[architecture]
    theirs = hugging_face.family_tensors(family, saved, tensors_of(saved), str(folder))
    hugging_face.write_folder(family, saved, theirs, None, folder, 1 << 30)
    return folder


def check_same_description(folder: Path) -> None:
    inspected, opened = inspect_folder(folder, NO_OPTIONS), open_source(folder, NO_OPTIONS)
    assert inspected is not None
    facts = [describe(source, with_tensors=True, with_shapes=False) for source in (inspected, opened)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    "fields", [{}, {"tie_embeddings": True, "vocab_size_multiple": 64, "normalization": "layer_norm"}]
)
def test_runs(fields: dict[str, Any], tmp_path: Path) -> None:
    check_same_description(written_run(tmp_path / "run", model(*sorted(set(SETTINGS) - set(RWKV)), **fields)))
    check_same_description(written_run(tmp_path / "shifted", model(*RWKV, "attention", block="rwkv7", **fields)))


MODELS = {
    "LlamaForCausalLM": model("attention", "attention"),
    "DeltaNetForCausalLM": model("deltanet"),
    "GLAForCausalLM": model("gla"),
    "GatedDeltaNetForCausalLM": model("gated_deltanet"),
    "Mamba2ForCausalLM": model("mamba2", block="mixer"),
    "MambaForCausalLM": model("mamba", block="mixer"),
    "NSAForCausalLM": model("nsa", num_attention_heads=16, num_query_groups=1),
    "RWKV7ForCausalLM": model("rwkv7", "rwkv7", block="rwkv7", normalization="layer_norm"),
    "SelectronForCausalLM": model("moba", "retnet"),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_hugging_face(architecture: str, tmp_path: Path) -> None:
    check_same_description(written_model(tmp_path / "hf", MODELS[architecture], architecture))


def test_no_torch_is_imported(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", model("attention", "gla"))
    hf = written_model(tmp_path / "hf", MODELS["GLAForCausalLM"], "GLAForCausalLM")
    folders = (run, run / "checkpoints" / "step_3", hf)
    commands = [["inspect", str(folder), *more] for folder in folders for more in ([], ["--json", "--tensors"])]
    assert not {"torch", "megatron"} & imported_by(*commands, code=0)


def test_a_mixer_outside_of_the_settings_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(tmp_path / "run", model("gla"))
    monkeypatch.delitem(SETTINGS, "gla")
    check_same_description(run)


def test_the_settings_are_those_of_the_mixers() -> None:
    assert {name: entry.config_type for name, entry in load_all().items() if name in SETTINGS} == SETTINGS


def changed(run: Path, **fields: Any) -> Path:
    """Change fields in the record of a run and return the run."""
    file = run / "checkpoints" / "step_3" / "checkpoint.json"
    record = json.loads(file.read_text())
    record["identity"].update({name.replace("__", "."): value for name, value in fields.items()})
    file.write_text(json.dumps(record))
    return run


@pytest.mark.parametrize(
    "fields",
    [
        {"model__pattern": "attention*3"},
        {"model__hidden_size": 64},
        {"model__tie_embeddings": True},
        {"data__vocab_size": 60},
        {"model__pattern": "atention"},
        {"model__pattern": "gla,attention"},
    ],
)
def test_a_contradictory_record_is_not_inspected(fields: dict[str, Any], tmp_path: Path) -> None:
    assert (
        inspect_folder(changed(written_run(tmp_path / "run", model("attention", "gla")), **fields), NO_OPTIONS) is None
    )


def test_a_damaged_checkpoint_is_not_inspected(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", model("attention"))
    (file,) = (run / "checkpoints" / "step_3").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert inspect_folder(run, NO_OPTIONS) is None


def test_shapes_are_compared_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the command sets it
    run = changed(written_run(tmp_path / "run", model("attention")), model__ffn_hidden_size=48)
    assert main(["inspect", str(run)]) == 0
    assert (
        "files                     complete, with all tensors of the configuration (checked by name; "
        in capsys.readouterr().out
    )
    assert main(["inspect", str(run), "--shapes"]) == 2
    assert "mlp.linear_fc1.weight has shape [128, 32] instead of [96, 32]" in capsys.readouterr().err
