"""Common parts of the programs that compare `selectron train` runs: arguments, starting a run, reading its steps."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def comparison_parser(description: str | None) -> argparse.ArgumentParser:
    """Build a parser with the arguments of every comparison.

    Use `parse_intermixed_args`, so that options may stand between positional arguments.

    Args:
        description: description of the program, shown unformatted.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], help="key=value, for every run")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def train(
    config: Path,
    overrides: Sequence[str],
    output: Path,
    name: str,
    *,
    processes: int,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run `selectron train` in separate processes.

    Args:
        config: YAML file.
        overrides: overrides of the configuration, key=value.
        output: existing folder. The run folder is runs/NAME below it, the log of stdout and stderr NAME.log.
        name: name of the run.
        processes: number of processes of the run.
        environment: environment variables to add or replace.

    Returns:
        The records of metrics.jsonl, one per step. The list is empty if the run failed, even if an earlier run left
        records there.
    """
    command = [sys.executable, "-m", "megatron_ext.cli", "train", str(config), *overrides]
    command += [f"run.dir={output / 'runs'}", f"run.name={name}", "--processes", str(processes)]
    with (output / f"{name}.log").open("w") as log:
        process = subprocess.run(
            command, env={**os.environ, **(environment or {})}, stdout=log, stderr=log, check=False
        )
    if process.returncode:
        return []
    lines = (output / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def largest_difference(losses: Sequence[float], reference: Sequence[float] | None) -> str:
    """Return the largest absolute difference between losses of the same step, or "" unless both curves exist."""
    if not losses or not reference:
        return ""
    return f"{max(abs(a - b) for a, b in zip(losses, reference, strict=True)):.1e}"
