"""What commands import before they have anything to do: told by `sys.modules`, as times depend on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imported_by(*commands: list[str], code: int) -> set[str]:
    """Top-level packages that commands import, one after the other in one process, each of which ends with a code."""
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
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_and_refusals_draw_and_fit_nothing(tmp_path: Path) -> None:
    nothing, output = str(tmp_path / "nothing"), ["--output", str(tmp_path / "out")]
    heavy = {"matplotlib", "scipy", "torch", "jinja2"}
    assert not heavy & imported_by(["report", "--help"], ["fit", "--help"], code=0)
    table = tmp_path / "points.csv"
    table.write_text("params,tokens\n1,2\n")
    refused = [["report", nothing, *output], ["fit", nothing, *output], ["fit", str(table), *output]]
    assert not heavy & imported_by(*refused, code=2)


def test_what_prepares_text_imports_no_torch() -> None:
    assert "torch" not in imported_by(["prepare", "--help"], code=0)
