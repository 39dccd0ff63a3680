"""Plant known faults one at a time in a copy of the sources, and report whether the tests catch each.

    python tools/plant_faults.py [--only WORDS] [--workers N] [--output docs/benchmarks/data/planted_faults.json]

A fault is caught if at least one of its tests fails. First the tests must pass without it. The exit code is 1 if a
fault is missed. `docs/testing.md` has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from planted_faults import FAULTS, PlantedFault

Item = TypeVar("Item")
Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parents[1]
MAX_OUTPUT = 4000
"""Characters of pytest's output in an error."""

TIMEOUT_SECONDS = 900
"""Seconds after which the tests of a fault are stopped. A fault that makes them hang counts as caught."""
FAILED = 1
"""Exit code of pytest if tests failed. Other codes mean that pytest itself failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plant the faults and print a line for each.

    Returns:
        0: every fault is caught. 1: some fault is missed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="plant only faults whose name contains WORDS")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="number of faults planted at once, each in its own copy (1)"
    )
    args = parser.parse_args(argv)
    selected = [fault for fault in FAULTS if args.only in fault.name]
    results = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as workers:
        copies: Queue[Path] = Queue()
        for worker in range(args.workers):
            copies.put(copy_sources(Path(folder) / f"sources_{worker}"))
        baselines = {
            tests: workers.submit(in_copy, copies, require_pass, tests) for tests in {fault.tests for fault in selected}
        }
        trials = [workers.submit(in_copy, copies, plant, fault) for fault in selected]
        for result in (trial.result() for trial in as_completed(trials)):
            results.append(result)
            verdict = "caught" if result["caught"] else "MISSED"
            print(f"{verdict}  {result['seconds']:6.0f} s  {result['name']}", flush=True)
            if args.output:
                args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        for baseline in baselines.values():
            baseline.result()
    return 0 if all(result["caught"] for result in results) else 1


def in_copy(copies: Queue[Path], function: Callable[[Path, Item], Result], item: Item) -> Result:
    """Call a function with a copy of the sources that no other thread uses at the same time."""
    copy = copies.get()
    try:
        return function(copy, item)
    finally:
        copies.put(copy)


def copy_sources(folder: Path) -> Path:
    """Copy the tracked files of the repository into a new folder and return the folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def require_pass(copy: Path, tests: str) -> None:
    """Run tests in a copy without a fault.

    Raises:
        RuntimeError: they do not pass.
    """
    code, output = run_tests(copy, tests)
    if code != 0:
        raise RuntimeError(f"{tests}: exit code {code} without a fault; correct the tests first\n{output}")


def plant(copy: Path, fault: PlantedFault) -> dict[str, Any]:
    """Plant a fault in a copy, run its tests, and restore the source.

    Raises:
        RuntimeError: pytest itself fails.
    """
    path, started = copy / fault.file, time.monotonic()
    source = path.read_text(encoding="utf-8")
    path.write_text(plant_text(source, fault), encoding="utf-8")
    try:
        code, output = run_tests(copy, fault.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    if code not in (0, FAILED, None):
        raise RuntimeError(f"{fault.tests}: exit code {code} with the fault {fault.name!r}\n{output}")
    seconds = round(time.monotonic() - started, 1)
    return {"name": fault.name, "file": fault.file, "tests": fault.tests, "caught": code != 0, "seconds": seconds}


def plant_text(source: str, fault: PlantedFault) -> str:
    """Return a source with the fault.

    Raises:
        ValueError: the text to replace does not occur exactly once.
    """
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"{fault.file}: the text of the fault {fault.name!r} occurs {count} times")
    return source.replace(fault.old, fault.new)


def run_tests(copy: Path, tests: str) -> tuple[int | None, str]:
    """Run tests in the copy until the first failure.

    Returns:
        pytest's exit code, None if the tests did not end in time, and the end of its output.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    python_path = os.pathsep.join(filter(None, [str(copy), inherited.get("PYTHONPATH")]))
    environment = inherited | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, (done.stdout + done.stderr)[-MAX_OUTPUT:]


if __name__ == "__main__":
    sys.exit(main())
