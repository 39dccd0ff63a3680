"""Checkpoints written by a plain GPTModel of megatron-core."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_runs
import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

pytestmark = pytest.mark.slow

MODEL = """
model: {pattern: "attention*4", hidden_size: 64, num_attention_heads: 4, num_query_groups: 2, ffn_hidden_size: 96,
        rotary_base: 5000.0}
data: {path: none, seq_length: 32}
"""


class Harmful:
    """Class whose pickle executes a command when loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Function that saves a model under a layout, once, and returns its folder and, in one process, its logits."""
    folders: dict[tuple[int, int, bool], tuple[Path, Any]] = {}

    def run(tensor: int = 1, pipeline: int = 1, stacked: bool = False) -> tuple[Path, Any]:
        case = tensor, pipeline, stacked
        if case not in folders:
            folder, common = tmp_path_factory.mktemp("plain") / "model", plain_runs.arguments()
            folders[case] = folder, pool.run(plain_runs.save, tensor * pipeline, folder, *case, common)[0]
        return folders[case]

    return run


@pytest.fixture
def model(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the folder of a model saved by one process, which a test may change."""
    return Path(shutil.copytree(saved()[0], tmp_path_factory.mktemp("copy") / "model"))


def change_common_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's common state: the arguments of Megatron-LM, and the iteration.

    megatron-core 0.19 stores it among the tensors, but the file common.pt takes precedence.
    """
    common = load_common_state_dict(str(folder))
    change(common)
    torch.save(common, folder / "common.pt")


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=plain_runs.tokens()).logits


@pytest.mark.parametrize("stacked", [False, True], ids=["by layer", "stacked"])
def test_a_gptmodel_becomes_llama(saved: Any, convert: Callable[..., int], tmp_path: Path, stacked: bool) -> None:
    folder, expected = saved(stacked=stacked)
    assert convert(folder, tmp_path / "hf", "--to", "hf") == 0
    assert float((logits(tmp_path / "hf") - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_a_parallel_model_converts(
    saved: Any, convert: Callable[..., int], tmp_path: Path, tensor: int, pipeline: int
) -> None:
    """Compare the converted model with the logits of megatron-core's own model."""
    folder, _ = saved(tensor, pipeline, stacked=pipeline == 2)
    assert convert(folder, tmp_path / "run", "--to", "megatron") == 0
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_7\n"


def test_the_newest_checkpoint_of_megatron_lms_folder_converts(
    model: Path, convert: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    model.rename(tmp_path / "iter_0000007")
    assert convert(tmp_path, tmp_path.parent / f"{tmp_path.name}_hf", "--to", "hf", "--dry-run") == 0


def test_missing_sizes_are_given_in_a_file(
    saved: Any, model: Path, convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_common_state(model, lambda common: [common.pop(name) for name in ("args", "iteration")])
    assert convert(model, tmp_path / "hf", "--to", "hf") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "contains no args" in line
    assert "--model-config" in line
    (tmp_path / "model.yaml").write_text(MODEL)
    assert convert(model, tmp_path / "hf", "--to", "hf", "--model-config", tmp_path / "model.yaml") == 0
    expected = saved()[1]
    # Without the arguments the padding rows are unknown.
    found = logits(tmp_path / "hf")[..., : plain_runs.VOCABULARY]
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"swiglu": False}, "args.swiglu: false is not supported; only true is supported"),
        (
            {"normalization": "LayerNorm"},
            'args.normalization: "LayerNorm" is not supported; only "RMSNorm" is supported',
        ),
        (
            {"position_embedding_type": "yarn"},
            'args.position_embedding_type: "yarn" is not supported; only "rope" or ',
        ),
        ({"ffn_hidden_size": 128}, "decoder.layers.0.mlp.linear_fc1.weight has shape [192, 64] instead of [256, 64]"),
        ({"num_layers": "4"}, 'args.num_layers: "4" is not a whole number above 0; '),
        ({"num_layers": 10**9}, "args.num_layers: 1000000000 is more than 10000 layers; "),
        ({"num_query_groups": 3}, "args.num_attention_heads: 4 is not divisible by num_query_groups 3; "),
        ({"consumed_train_samples": [0]}, "args.consumed_train_samples: [0] is not a whole number above 0; "),
        ({"num_layers": 3}, "has besides decoder.layers.3.input_layernorm.weight"),
    ],
)
def test_unsupported_models_are_refused(
    model: Path,
    convert: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    line: str,
) -> None:
    change_common_state(model, lambda common: common.update(plain_runs.arguments(**changed)))
    assert convert(model, tmp_path / "hf", "--to", "hf") == 2
    (found,) = capsys.readouterr().err.splitlines()
    assert line in found
    assert not list(tmp_path.iterdir())


def test_code_in_a_checkpoint_is_not_run(
    model: Path, convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"args": Namespace(evil=Harmful(tmp_path / "ran"))}, model / "common.pt")
    assert convert(model, tmp_path / "hf", "--to", "hf") == 2
    assert "common.pt: cannot be read" in capsys.readouterr().err
    import pickle

    (model / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "ran")))
    assert convert(model, tmp_path / "hf", "--to", "hf") == 2
    assert "mkdir, which is not allowed in a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
