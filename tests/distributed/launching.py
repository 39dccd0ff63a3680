"""Helpers that run `selectron` commands, in processes of their own as a user does or in this one, and read records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pool import ENVIRONMENT

from megatron_ext.cli import main

ROOT = Path(__file__).parents[2]
STEPS = 10
TP2 = ["parallel.tensor=2", "parallel.sequence=true"]
CONFIG = """
data: {{path: {data}, seq_length: 64}}
model: {{pattern: "top1_chunk,gated_deltanet,attention,top1_element", hidden_size: 32, num_attention_heads: 4}}
mixers: {{top1_chunk: {{chunk_size: 16}}}}
training: {{steps: {steps}, global_batch_size: 4, micro_batch_size: 2, precision: fp32, evaluate_every: 5,
            evaluation_sequences: 3, checkpoint_every: 3, keep_checkpoints: 0}}
optimizer: {{lr: 1e-3, min_lr: 1e-4, warmup_steps: 2}}
run: {{dir: {runs}, name: run, device: cpu}}
"""


def write_config(folder: Path, data: Path, runs: Path) -> Path:
    """Write the configuration of all runs of these tests. Its run folder is `runs/run`."""
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(data=data, runs=runs, steps=STEPS))
    return path


def environment() -> dict[str, str]:
    """Environment of a command, without the variables of a launcher that the tests themselves may run under."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in launcher} | ENVIRONMENT


def start(
    config: Path, arguments: Sequence[str], processes: int, command: Sequence[str] = ("-m", "megatron_ext.cli")
) -> subprocess.Popen[str]:
    """Start `selectron train` as a user does, or another program with the same arguments."""
    train = [sys.executable, *command, "train", str(config), *arguments, "--processes", str(processes)]
    return subprocess.Popen(
        train, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(config: Path, arguments: Sequence[str], processes: int = 1) -> tuple[int, str]:
    """Run the command to its end. Return exit code and standard error."""
    process = start(config, arguments, processes)
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, errors


def must_run(config: Path, arguments: Sequence[str], processes: int = 1) -> str:
    """Run the command, which must succeed. Return standard error."""
    code, errors = run(config, arguments, processes)
    assert code == 0, errors
    return errors


def call(config: Path, *arguments: str) -> int:
    """Run `selectron train` in this process: for errors before a model is built, or for a small model on one rank."""
    return call_command("train", str(config), *arguments)


def call_command(*arguments: str) -> int:
    """Run a `selectron` command in this process, as its only rank. Return the exit code."""
    from megatron_ext.parallel.groups import destroy_process_groups

    with patch.dict(os.environ, environment(), clear=True):
        try:
            return main(list(arguments))
        finally:
            destroy_process_groups()


def records(run_folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Read the complete lines of a record file."""
    path = run_folder / name
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def curve(run_folder: Path) -> list[tuple[int, float, float, float, int]]:
    """Values that must be bit-identical: step, loss, gradient norm, learning rate and token count of every step."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in records(run_folder)]


def losses(run_folder: Path) -> list[float]:
    assert [r["step"] for r in records(run_folder)] == list(range(1, STEPS + 1))
    return [r["loss"] for r in records(run_folder)]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and content of every file except locks, to show that nothing was changed."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "lock"
    }


def wait_for_step(process: subprocess.Popen[str], run_folder: Path, step: int) -> None:
    """Wait until a running command has recorded a step."""
    deadline = time.monotonic() + 240
    while len(records(run_folder)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)
