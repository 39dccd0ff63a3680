"""Plant known faults one at a time in a copy of the sources, and report whether the tests catch each.

    python tools/plant_faults.py [--only WORDS] [--output docs/benchmarks/data/planted_faults.json]

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
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from planted_faults import FAULTS, PlantedFault

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900
"""Seconds after which the tests of a fault are ended. A fault that makes them hang is caught."""
FAILED = 1
"""Exit code of pytest if tests failed. Others mean that pytest itself went wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plant the faults and print a line for each.

    Returns:
        0: every fault is caught. 1: some fault is missed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="plant only faults whose name contains WORDS")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    given = parser.parse_args(argv)
    results = []
    with TemporaryDirectory() as folder:
        copy = copied_sources(Path(folder) / "sources")
        for fault in FAULTS:
            if given.only not in fault.name:
                continue
            results.append(result := tried(copy, fault))
            print(f"{'caught' if result['caught'] else 'MISSED'}  {result['seconds']:6.0f} s  {fault.name}", flush=True)
            if given.output:
                given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result["caught"] for result in results) else 1


def copied_sources(folder: Path) -> Path:
    """Copy the tracked files of the repository into a new folder and return the folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def tried(copy: Path, fault: PlantedFault) -> dict[str, object]:
    """Plant a fault, run its tests, and restore the source.

    Raises:
        RuntimeError: the tests do not pass without the fault, or pytest itself fails.
    """
    if (code := run_tests(copy, fault.tests)) != 0:
        raise RuntimeError(f"{fault.tests}: exit code {code} without a fault; mend the tests first")
    path, begun = copy / fault.file, time.monotonic()
    source = path.read_text(encoding="utf-8")
    path.write_text(planted(source, fault), encoding="utf-8")
    try:
        code = run_tests(copy, fault.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    if code not in (0, FAILED, None):
        raise RuntimeError(f"{fault.tests}: exit code {code} with the fault {fault.name!r}")
    return {"name": fault.name, "file": fault.file, "caught": code != 0, "seconds": time.monotonic() - begun}


def planted(source: str, fault: PlantedFault) -> str:
    """Return a source with the fault.

    Raises:
        ValueError: the text to replace does not occur exactly once.
    """
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"{fault.file}: the text of the fault {fault.name!r} occurs {count} times")
    return source.replace(fault.old, fault.new)


def run_tests(copy: Path, tests: str) -> int | None:
    """Run tests in the copy until the first failure and return pytest's exit code; None: they did not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = own | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
