"""The command `selectron generate` on a run that two processes trained."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from data_prep.manifest import load_manifest
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.cli import main
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import ParallelConfig
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform.device import select_platform
from megatron_ext.training.build import build_trainer

pytestmark = pytest.mark.slow

PROMPT, NEW = "karalo mitin sto", 20


def _generate(run: Path, *arguments: str) -> int:
    try:
        return main(["generate", str(run), *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def _said(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    assert _generate(run, "--prompt", PROMPT, "--max-tokens", str(NEW), *arguments) == 0
    return capsys.readouterr().out


def _likeliest(run: Path, step: int) -> str:
    """Greedy text by repeated full passes over all tokens, with the model as training would resume it."""
    config = replace(load_config(run / "config.yaml", [], load_all()), parallel=ParallelConfig())
    root, platform = Path(config.data.path), select_platform("cpu")
    entry = load_manifest(root).tokenizer
    tokenizer = Tokenizer.from_file(str(root / entry.file))
    ids = tokenizer.encode(PROMPT).ids
    with groups_of_one_process("gloo") as groups:
        trainer = build_trainer(config, model_shape(config, platform, entry.vocab_size), groups, platform)
        store = CheckpointStore(run / "checkpoints", {}, groups, platform)
        store.load(trainer.optimizer, store.check(step))
        model = trainer.optimizer.chunks[0].eval()
        for _ in range(NEW):
            with torch.no_grad():
                logits_btv = model(torch.tensor([ids]), torch.arange(len(ids))[None], attention_mask=None)
            ids.append(int(logits_btv[0, -1, : entry.vocab_size].argmax()))
    assert entry.eos_id not in ids
    return tokenizer.decode(ids)[len(PROMPT) :]


def test_greedy_text_is_that_of_repeated_passes_over_all_tokens(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert _generate(run, "--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", str(NEW), "--greedy") == 0
    newest = capsys.readouterr().out
    assert newest == _likeliest(run, 4) + "\n"
    earlier = _said(capsys, run, "--greedy", "--step", "2")
    assert earlier == _likeliest(run, 2) + "\n" != newest


def test_a_seed_gives_the_same_text(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    drawn = [_said(capsys, run, "--seed", seed, "--top-p", "0.95") for seed in ("5", "5", "6")]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "one of the arguments --prompt --prompt-file is required; see `selectron generate --help`"),
        (["--prompt", ""], "--prompt: is empty; give the beginning of a text"),
        (["--prompt-file", "{run}/none"], "--prompt-file: {run}/none cannot be read (No such file or directory); "),
        (["--prompt-file", "{run}/latin"], "--prompt-file: {run}/latin is not UTF-8; "),
        (
            ["--prompt", "a", "--temperature", "0"],
            "--temperature: 0.0 is not above 0 and finite; give a finite number above 0, or use --greedy",
        ),
        (["--prompt", "a", "--temperature", "nan"], "--temperature: nan is not above 0 and finite; "),
        (["--prompt", "a", "--top-p", "0"], "--top-p: 0.0 is not in (0, 1]; "),
        (["--prompt", "a", "--top-p", "1.01"], "--top-p: 1.01 is not in (0, 1]; "),
        (["--prompt", "a", "--seed", "-1"], "--seed: -1 is not in 0 .. "),
        (
            ["--prompt", "a", "--greedy", "--top-p", "0.5"],
            "--greedy: does not sample, so --temperature and --top-p have no effect; ",
        ),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens: 0 is less than 1; "),
        (
            ["--prompt", "a", "--max-tokens", "64"],
            "--max-tokens: 64 after a prompt of 1 tokens exceeds model.max_position_embeddings 64; ",
        ),
        (
            ["--prompt", "a", "--max-tokens", "9", "--step", "7"],
            "{run}/checkpoints/step_7: does not exist; give {run} with another --step (available: 2, 4)",
        ),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], run: Path, arguments: list[str], line: str) -> None:
    (run / "latin").write_bytes(b"na\xefve")
    assert _generate(run, *(argument.format(run=run) for argument in arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (found,) = said.err.splitlines()
    assert found.startswith(f"selectron: error: {line.format(run=run)}")


def test_a_folder_that_is_no_run_or_holds_no_checkpoint(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    hint = "give the folder of a run: run.dir/run.name"
    assert _generate(tmp_path / "none", "--prompt", "a") == 2
    assert capsys.readouterr().err == f"selectron: error: {tmp_path}/none: is not a directory; {hint}\n"
    assert _generate(tmp_path, "--prompt", "a") == 2
    assert capsys.readouterr().err == f"selectron: error: {tmp_path}: contains no config.yaml; {hint}\n"
    shutil.copy(run / "config.yaml", tmp_path)
    assert _generate(tmp_path, "--prompt", "a", "--max-tokens", "9") == 2
    assert f"{tmp_path}/checkpoints: contains no checkpoint; train the run" in capsys.readouterr().err
