"""Command `selectron convert` for damaged or foreign checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from failed_conversions import Convert, edited, no_shard, refused

pytestmark = pytest.mark.slow


def _half_a_shard(folder: Path) -> str:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "model-00001-of-00002.safetensors: is damaged ("


def _no_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("[]")
    return "model.safetensors.index.json: cannot be read as an index"


def _no_weights(folder: Path) -> str:
    for path in folder.glob("model*"):
        path.unlink()
    return "hf: contains neither model.safetensors nor model.safetensors.index.json; "


def _another_width(folder: Path) -> str:
    edited(folder, intermediate_size=100)
    return "mlp.linear_fc1.weight has shape [384, 64] instead of [200, 64]"


def _more_layers(folder: Path) -> str:
    edited(folder, num_hidden_layers=3)
    return "hf: does not contain the tensors of its configuration: lacks model.layers.2.input_layernorm.weight, "


def _fewer_layers(folder: Path) -> str:
    edited(folder, num_hidden_layers=1)
    return "has besides model.layers.1.input_layernorm.weight, "


def _no_number(folder: Path) -> str:
    edited(folder, hidden_size="64")
    return 'config.json: hidden_size: "64" is not a whole number above 0; '


def _no_field(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    return "config.json: intermediate_size: missing; "


def _foreign(folder: Path) -> str:
    edited(folder, architectures=["BertForMaskedLM"])
    return "config.json: architecture BertForMaskedLM is not supported; give one of LlamaForCausalLM, "


def _scaled_rotation(folder: Path) -> str:
    edited(folder, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    return 'config.json: rope_parameters.rope_type: "llama3" is not supported; only "default" is supported'


def _biases(folder: Path) -> str:
    edited(folder, attention_bias=True)
    return "config.json: attention_bias: true is not supported; only false is supported"


def _no_heads(folder: Path) -> str:
    edited(folder, num_attention_heads=0)
    return "config.json: num_attention_heads: 0 is not a whole number above 0; "


def _heads_of_no_group(folder: Path) -> str:
    edited(folder, num_key_value_heads=3)
    return "config.json: num_attention_heads: 4 is not divisible by num_key_value_heads 3; "


def _no_rotation(folder: Path) -> str:
    edited(folder, rope_parameters=[1])
    return "config.json: rope_parameters: [1] is not a mapping of fields; "


def _part_of_a_rotation(folder: Path) -> str:
    edited(folder, partial_rotary_factor=0.5)
    return "config.json: partial_rotary_factor: 0.5 is not supported; only 1.0 is supported"


def _no_names(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 5}}))
    return "model.safetensors.index.json: names 5, which is not text"


def _no_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json: cannot be read ("


DAMAGES = [
    *(no_shard, _half_a_shard, _no_index, _no_weights),
    *(_another_width, _more_layers, _fewer_layers, _no_number, _no_field, _no_json),
    *(_foreign, _scaled_rotation, _biases, _no_heads, _heads_of_no_group, _no_rotation, _part_of_a_rotation, _no_names),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_folder(
    hf: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any
) -> None:
    message = damage(hf)
    assert message in refused(convert, capsys, hf, tmp_path)


def test_a_damaged_run(run_copy: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_copy, copy)
    shard = next((copy / "checkpoints" / "step_2").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert f"step_2/{shard.name}: has checksum " in refused(convert, capsys, copy, tmp_path)
    shard.unlink()
    assert f"step_2/{shard.name}: is missing, so the checkpoint is damaged" in refused(convert, capsys, copy, tmp_path)


def test_other_folders_are_refused(convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty: is no checkpoint: there is no checkpoint.json" in refused(
        convert, capsys, tmp_path / "empty", tmp_path
    )
    assert "none: does not exist; " in refused(convert, capsys, tmp_path / "none", tmp_path)
    (tmp_path / "empty" / "latest").write_text("global_step5")
    (tmp_path / "empty" / "global_step5").mkdir()
    (tmp_path / "empty" / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")
    for folder in (tmp_path / "empty", tmp_path / "empty" / "global_step5"):
        message = refused(convert, capsys, folder, tmp_path)
        assert "is a DeepSpeed checkpoint that only loads under its own parallel layout; convert it" in message


def test_the_error_for_an_older_record_names_the_options(
    run_copy: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_copy, copy)
    record = copy / "checkpoints" / "step_2" / "checkpoint.json"
    content = json.loads(record.read_text())
    del content["identity"]["data.vocab_size"]
    record.write_text(json.dumps(content))
    assert "does not contain data.vocab_size of the model; give the run's config.yaml with --model-config" in refused(
        convert, capsys, copy, tmp_path
    )
