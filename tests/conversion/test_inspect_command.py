"""Command `selectron inspect` of a run, of a converted model and of a damaged one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from failed_conversions import error, no_shard

from megatron_ext.cli import main

pytestmark = pytest.mark.slow


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect(run_copy: Path, hf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ours, theirs = inspected(capsys, run_copy), inspected(capsys, hf, "--tensors")
    expected = {"pattern": "attention*2", "layers": 2, "hidden_size": 64, "vocab_size": 300, "whole": True}
    # Two vocabulary matrices, two norms and four matrices per layer, and the final norm.
    expected["parameters"] = 2 * 300 * 64 + 2 * (2 * 64 + 3 * 64 * 64 + 64 * 64 + 3 * 64 * 192) + 64
    for facts in (ours, theirs):
        assert {key: facts[key] for key in expected} == expected
        assert facts["to"] == {"hf": None, "megatron": None, "deepspeed-universal": None}
    assert (ours["format"], ours["step"], ours["tokens"], ours["optimizer_state"]) == ("selectron", 2, 512, True)
    assert (theirs["format"], theirs["architecture"]) == ("hugging_face", "LlamaForCausalLM")
    assert (theirs["step"], theirs["optimizer_state"]) == (None, False)
    assert theirs["tensors"]["lm_head.weight"] == {"shape": [300, 64], "dtype": "float32"}
    assert main(["inspect", str(run_copy)]) == 0
    assert "attention*2 (2 layers)" in capsys.readouterr().out


def test_inspect_damaged_checkpoints(
    hf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = no_shard(hf)
    capsys.readouterr()
    assert main(["inspect", str(hf)]) == 2
    assert message in error(capsys)
    assert main(["inspect", str(hf), "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["whole"] is False
    assert message.split(":")[0] in facts["problem"]
