"""Runs of the real command that are stopped, in every way there is, and continued: the curve must be the same.

The helpers here start `selectron train` in processes of its own; `test_faults.py` uses them, too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from data_prep.prepare import PrepareOptions, prepare
from megatron_ext.cli import main

ROOT = Path(__file__).parents[2]
STEPS = 10
TP2 = ["parallel.tensor=2", "parallel.sequence=true"]
CONFIG = """
data: {{path: {data}, seq_length: 64}}
model: {{pattern: "top1_chunk,gated_deltanet,attention,top1_element", hidden_size: 32, num_attention_heads: 4}}
mixers: {{top1_chunk: {{chunk_size: 16}}}}
training: {{steps: {steps}, global_batch_size: 4, micro_batch_size: 2, precision: fp32, evaluate_every: 5,
            evaluation_sequences: 6, checkpoint_every: 3, keep_checkpoints: 0}}
optimizer: {{lr: 1e-3, min_lr: 1e-4, warmup_steps: 2}}
run: {{dir: {runs}, name: run, device: cpu}}
"""


# --- the command -----------------------------------------------------------------------------------------------------


def prepared(folder: Path) -> Path:
    """A small data folder: two training domains, one test domain, a tokenizer of its own."""
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe") for b in ("ra", "sto", "tin", "vel")]
    dice = random.Random(1)
    with (folder / "raw.jsonl").open("w") as raw:
        for number in range(180):
            text = " ".join(dice.choices(words, k=dice.randint(10, 80)))
            domain = ("First", "Second", "Other")[number % 3]
            raw.write(json.dumps({"text": f"{text} {number}", "meta": {"redpajama_set_name": domain}}) + "\n")
    prepare(
        PrepareOptions(
            input=str(folder / "raw.jsonl"),
            output=str(folder / "data"),
            train_domains=["First", "Second"],
            test_domains=["Other"],
            tokenizer="train",
            vocab_size=300,
            validation_fraction=0.2,
            shard_tokens=1500,
            progress=False,
        )
    )
    return folder / "data"


def write_config(folder: Path, data: Path, runs: Path) -> Path:
    """The configuration of all runs here; its run folder is `runs/run`."""
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(data=data, runs=runs, steps=STEPS))
    return path


def environment() -> dict[str, str]:
    """Of a command, whatever launcher the tests themselves run under."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {key: value for key, value in os.environ.items() if key not in launcher} | own


def start(config: Path, arguments: Sequence[str], processes: int) -> subprocess.Popen[str]:
    """`selectron train` as a user starts it."""
    command = [sys.executable, "-m", "megatron_ext.cli", "train", str(config), *arguments]
    command += ["--processes", str(processes)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(config: Path, arguments: Sequence[str], processes: int = 1) -> tuple[int, str]:
    """Run the command to its end; exit code and standard error."""
    process = start(config, arguments, processes)
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, errors


def must_run(config: Path, arguments: Sequence[str], processes: int = 1) -> str:
    """Run the command, which must succeed; its standard error."""
    code, errors = run(config, arguments, processes)
    assert code == 0, errors
    return errors


def call(config: Path, *arguments: str) -> int:
    """The command in this process, for what ends before a model is built."""
    from megatron_ext.parallel.groups import destroy_process_groups

    with patch.dict(os.environ, environment(), clear=True):
        try:
            return main(["train", str(config), *arguments])
        finally:
            destroy_process_groups()


def records(run_folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Lines of a record file, as far as they are whole."""
    path = run_folder / name
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def curve(run_folder: Path) -> list[tuple[int, float, float, float, int]]:
    """What must be the same to the last bit: every step's loss, gradient norm, rate and token count."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in records(run_folder)]


def losses(run_folder: Path) -> list[float]:
    assert [r["step"] for r in records(run_folder)] == list(range(1, STEPS + 1))
    return [r["loss"] for r in records(run_folder)]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content, to show that nothing was touched."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def wait_for_step(process: subprocess.Popen[str], run_folder: Path, step: int) -> None:
    """Wait until a running command has recorded a step."""
    deadline = time.monotonic() + 120
    while len(records(run_folder)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)


# --- fixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("prepared"))


class References:
    """Uninterrupted runs, each made when it is first asked for and never touched again."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._folder, self._data = folder, data
        self._made: dict[str, Path] = {}

    def __call__(self, layout: str) -> Path:
        """The run folder of `one`, `dp2` or `tp2`."""
        if layout not in self._made:
            folder = self._folder / layout
            folder.mkdir()
            config = write_config(folder, self._data, folder)
            must_run(config, TP2 if layout == "tp2" else [], processes=1 if layout == "one" else 2)
            self._made[layout] = folder / "run"
        return self._made[layout]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[References]:
    return References(tmp_path_factory.mktemp("references"), data)


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Path:
    """A configuration whose run folder, `tmp_path / "run"`, is not there yet."""
    return write_config(tmp_path, data, tmp_path)


# --- the same layout: the same bits ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_killed_at_a_random_step_continues_to_the_last_bit(
    tmp_path: Path, config: Path, reference: References
) -> None:
    folder, seed = tmp_path / "run", random.SystemRandom().randrange(2**32)
    step = random.Random(seed).randint(4, STEPS - 2)  # from the first checkpoint on, and before the end
    print(f"seed {seed}: killed after step {step}")
    process = start(config, TP2, 2)
    wait_for_step(process, folder, step)
    process.kill()
    process.communicate()
    done = len(records(folder))
    assert step <= done < STEPS
    must_run(config, [*TP2, "--resume"], processes=2)
    assert curve(folder) == curve(reference("tp2"))
    assert records(folder, "evaluation.jsonl") == records(reference("tp2"), "evaluation.jsonl")
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, config: Path, reference: References
) -> None:
    folder = tmp_path / "run"
    process = start(config, [], 1)
    wait_for_step(process, folder, 1)
    process.kill()
    process.communicate()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # had the machine been quick
    must_run(config, ["--resume"])
    assert curve(folder) == curve(reference("one"))


@pytest.mark.slow
def test_signals_end_a_run_with_a_checkpoint_from_which_it_continues(
    tmp_path: Path, config: Path, reference: References
) -> None:
    folder, resume = tmp_path / "run", []
    for number, step in ((signal.SIGTERM, 1), (signal.SIGINT, 5)):
        process = start(config, [*TP2, *resume], 2)
        wait_for_step(process, folder, step)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        done = len(records(folder))
        assert step <= done < STEPS
        assert f"stopped at step {done} with a checkpoint" in errors
        assert f"selectron train {folder / 'config.yaml'} --processes 2 --resume" in errors
        assert (folder / "checkpoints" / "latest").read_text() == f"step_{done}\n"
        assert "Traceback" not in errors
        resume = ["--resume"]
    # As the message says: with the configuration that the run has kept.
    must_run(folder / "config.yaml", ["--resume"], processes=2)
    assert curve(folder) == curve(reference("tp2"))
    assert records(folder, "evaluation.jsonl") == records(reference("tp2"), "evaluation.jsonl")


# --- another layout: the same curve ----------------------------------------------------------------------------------

DP2: list[str] = []
PP2 = ["parallel.pipeline=2"]
CP2 = ["parallel.context=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("one", TP2), ("dp2", PP2), ("tp2", CP2)],
    ids=["one process to tp2", "dp2 to pp2", "tp2 to cp2"],
)
def test_a_run_continues_on_another_layout(
    before: str, after: list[str], tmp_path: Path, config: Path, reference: References
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference(before), folder)
    must_run(config, [*after, "--from-step", "3"], processes=2)
    assert losses(folder) == pytest.approx(losses(reference(before)), abs=1e-5, rel=0)
    ours, theirs = (records(r, "evaluation.jsonl") for r in (folder, reference(before)))
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], abs=1e-5, rel=0)
    for field in ("step", "tokens", "domain", "split", "documents", "document_tokens", "num_tokens"):
        assert [r[field] for r in ours] == [r[field] for r in theirs]
    assert curve(folder)[:3] == curve(reference(before))[:3]  # what was done is kept
    assert (folder / "config.until_step_3.yaml").exists()
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{STEPS}\n"


@pytest.mark.slow
def test_layouts_have_one_curve(reference: References) -> None:
    for layout in ("dp2", "tp2"):
        assert losses(reference(layout)) == pytest.approx(losses(reference("one")), abs=1e-5, rel=0)


# --- asked for what cannot be done -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_run_says_so_and_stays_as_it_is(
    tmp_path: Path, config: Path, reference: References, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference("one"), folder)
    before = snapshot(folder)
    assert call(config, "--resume") == 0
    assert capsys.readouterr().err == f"{folder} is finished: step {STEPS} of {STEPS}\n"
    assert snapshot(folder) == before


@pytest.mark.slow
def test_a_run_is_not_begun_over_another(
    tmp_path: Path, config: Path, reference: References, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference("one"), folder)
    before = snapshot(folder)
    assert call(config) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"selectron: error: run.name: {folder} holds a run already")
    assert "--resume" in line
    assert line.count("\n") == 1
    assert snapshot(folder) == before


@pytest.mark.slow
def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(
    tmp_path: Path, config: Path, reference: References, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference("one"), folder)
    before = snapshot(folder)
    assert call(config, "--from-step", "4") == 2
    line = capsys.readouterr().err
    assert str(folder / "checkpoints" / "step_4") in line
    assert "3, 6, 9, 10" in line
    assert line.count("\n") == 1
    assert snapshot(folder) == before
