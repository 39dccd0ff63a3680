"""Packages that commands import, determined in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imported_by(*commands: list[str], code: int) -> set[str]:
    """Top-level packages imported by commands that run in sequence in one process. Each must exit with `code`."""
    script = (
        "import sys\n"
        "from megatron_ext import cli\n"
        f"for command in {commands!r}:\n"
        "    try: found = cli.main(command)\n"
        "    except SystemExit as stop: found = stop.code or 0\n"
        f"    assert found == {code}, (command, found)\n"
        "print('imported', *{name.split('.')[0] for name in sys.modules})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])
