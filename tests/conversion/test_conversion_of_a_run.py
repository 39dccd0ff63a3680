"""A run that two processes trained, converted to Hugging Face with its tokenizer, and back to a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import whole_run
from corpora import prepared
from launching import TP2, call, write_config
from tokenizers import Tokenizer

from megatron_ext.cli import main

pytestmark = pytest.mark.slow

PROMPT = "karalo mitin sto"
SETTINGS = [*TP2, "model.pattern=attention*2", "model.init_std=0.3", "training.steps=4", "training.checkpoint_every=2"]


@pytest.fixture(scope="module")
def run(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    pool.run(whole_run.run, 2, write_config(folder, prepared(folder, documents=60), folder), SETTINGS)
    return folder / "run"


def text(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", PROMPT, "--max-tokens", "12", "--greedy"]) == 0
    return capsys.readouterr().out


def test_a_round_trip_of_a_run(
    run: Path, convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf, back = tmp_path / "hf", tmp_path / "back"
    assert convert(run, hf, "--to", "hf") == 0
    assert convert(hf, back, "--to", "megatron") == 0
    assert (hf / "tokenizer.json").read_bytes() == (run.parent / "data" / "tokenizer.json").read_bytes()
    tokenizer, model = AutoTokenizer.from_pretrained(hf), AutoModelForCausalLM.from_pretrained(hf)
    encoded = tokenizer(PROMPT, return_tensors="pt")
    assert encoded.input_ids[0].tolist() == Tokenizer.from_file(str(hf / "tokenizer.json")).encode(PROMPT).ids
    assert tokenizer.eos_token == "<|endoftext|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    generated = model.generate(encoded.input_ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    ours = text(capsys, run)
    assert tokenizer.decode(generated[0, encoded.input_ids.shape[1] :]) + "\n" == ours
    assert text(capsys, back) == ours


def test_a_converted_run_cannot_be_resumed(
    run: Path, convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(run, tmp_path / "hf", "--to", "hf", "--no-verify") == 0
    assert convert(tmp_path / "hf", tmp_path / "model", "--to", "megatron", "--no-verify") == 0
    capsys.readouterr()
    assert call(tmp_path / "model" / "config.yaml", "--resume") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoints/step_0: contains only a converted model, without optimizer state, random generators" in line
    assert call(tmp_path / "model" / "config.yaml") == 2
    assert "already contains a run" in capsys.readouterr().err


def test_the_record_contains_the_complete_model(run: Path) -> None:
    """The record contains every field, because another version may change defaults."""
    from megatron_ext.conversion.core.saved_model import identity_of, saved_model

    identity = json.loads((run / "checkpoints" / "step_4" / "checkpoint.json").read_text())["identity"]
    found = identity_of(saved_model(identity, "record"), "fp32")
    assert found == {key: identity[key] for key in found}
    assert {key for key in identity if key.startswith(("model.", "mixers."))} <= found.keys()
