"""What the programs that compare `selectron train` runs share: their arguments, a run, what its steps were."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def comparing(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every comparison takes; its options may stand between the positional arguments.

    Args:
        description: of the program, shown as it is.
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
    """Train in processes of their own.

    Args:
        config: YAML file.
        overrides: of it, key=value.
        output: exists; the run goes into runs/NAME below it, what it says into NAME.log.
        name: of the run.
        processes: that train together.
        environment: what is otherwise than here.

    Returns:
        The lines of its metrics.jsonl, one a step; none if it failed, whatever an earlier run has left there.
    """
    command = [sys.executable, "-m", "megatron_ext.cli", "train", str(config), *overrides]
    command += [f"run.dir={output / 'runs'}", f"run.name={name}", "--processes", str(processes)]
    with (output / f"{name}.log").open("w") as log:
        done = subprocess.run(command, env={**os.environ, **(environment or {})}, stdout=log, stderr=log, check=False)
    if done.returncode:
        return []
    lines = (output / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def largest_difference(losses: Sequence[float], reference: Sequence[float] | None) -> str:
    """Of any two losses of a step; empty without two curves."""
    if not losses or not reference:
        return ""
    return f"{max(abs(a - b) for a, b in zip(losses, reference, strict=True)):.1e}"
