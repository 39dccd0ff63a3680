"""Modules that commands import at startup, from `sys.modules`, because times depend on the machine."""

from __future__ import annotations

from pathlib import Path

from imported import imported_by


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
