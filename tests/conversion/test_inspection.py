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
from megatron_ext.conversion.core.inspection import look
from megatron_ext.conversion.core.opening import open_source
from megatron_ext.conversion.core.our_model import expected_tensors
from megatron_ext.conversion.core.saved_model import saved_model
from megatron_ext.conversion.core.source import SourceOptions
from megatron_ext.conversion.core.tensors import Listed
from megatron_ext.conversion.huggingface import folder as hugging_face
from megatron_ext.conversion.huggingface.families import FAMILIES
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.mixers.core.settings import SETTINGS

RWKV = ("rwkv6", "rwkv7")
NOTHING = SourceOptions()


def model(*mixers: str, **fields: Any) -> Any:
    """Small model with one layer per mixer, with usual settings."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "head_dim": 16, "ffn_hidden_size": 64}
    plain = ModelConfig(pattern=",".join(mixers), max_position_embeddings=64, **{**sizes, **fields})
    identity = {f"model.{name}": value for name, value in vars(plain).items() if not name.startswith("__")}
    identity |= {f"mixers.{name}.{key}": v for name in mixers for key, v in vars(SETTINGS[name]()).items()}
    return saved_model({**identity, "data.vocab_size": 50, "data.seq_length": 64}, "here")


def tensors_of(saved: Any) -> Listed:
    infos = expected_tensors(saved)
    return Listed(infos, lambda key: torch.zeros(infos[key].shape, dtype=infos[key].dtype))


def written_run(folder: Path, saved: Any) -> Path:
    folder.mkdir()
    selectron_run.write_run(saved, tensors_of(saved), "fp32", Progress(3, 4, 5), folder, folder.name)
    return folder


def written_model(folder: Path, saved: Any, architecture: str) -> Path:
    folder.mkdir()
    family = FAMILIES[architecture]
    theirs = hugging_face.theirs(family, saved, tensors_of(saved), str(folder))
    hugging_face.write_folder(family, saved, theirs, None, folder, 1 << 30)
    return folder


def check_alike(folder: Path) -> None:
    looked, opened = look(folder, NOTHING), open_source(folder, NOTHING)
    assert looked is not None
    facts = [describe(source, with_tensors=True, with_shapes=False) for source in (looked, opened)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    "fields", [{}, {"tie_embeddings": True, "vocab_size_multiple": 64, "normalization": "layer_norm"}]
)
def test_runs(fields: dict[str, Any], tmp_path: Path) -> None:
    check_alike(written_run(tmp_path / "run", model(*sorted(set(SETTINGS) - set(RWKV)), **fields)))
    check_alike(written_run(tmp_path / "shifted", model(*RWKV, "attention", block="rwkv7", **fields)))


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
    check_alike(written_model(tmp_path / "hf", MODELS[architecture], architecture))


def test_no_torch_is_imported(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", model("attention", "gla"))
    hf = written_model(tmp_path / "hf", MODELS["GLAForCausalLM"], "GLAForCausalLM")
    folders = (run, run / "checkpoints" / "step_3", hf)
    commands = [["inspect", str(folder), *more] for folder in folders for more in ([], ["--json", "--tensors"])]
    assert not {"torch", "megatron"} & imported_by(*commands, code=0)


def test_a_mixer_that_brings_its_settings_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(tmp_path / "run", model("gla"))
    monkeypatch.delitem(SETTINGS, "gla")
    check_alike(run)


def test_the_settings_are_those_of_the_mixers() -> None:
    assert {name: entry.config_type for name, entry in load_all().items() if name in SETTINGS} == SETTINGS


def changed(run: Path, **fields: Any) -> Path:
    """Change model fields in the record of a run. Return the run."""
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
def test_what_does_not_fit_is_left_to_who_opens_it(fields: dict[str, Any], tmp_path: Path) -> None:
    assert look(changed(written_run(tmp_path / "run", model("attention", "gla")), **fields), NOTHING) is None


def test_damage_is_left_to_who_opens_it(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", model("attention"))
    (file,) = (run / "checkpoints" / "step_3").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert look(run, NOTHING) is None


def test_shapes_are_compared_where_asked(
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
    assert "mlp.linear_fc1.weight is [128, 32], its configuration makes it [96, 32]" in capsys.readouterr().err
