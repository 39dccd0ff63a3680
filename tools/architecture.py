"""Floors of the packages, and the picture of them in `docs/architecture.svg`.

    python tools/architecture.py docs/architecture.svg

A package may import packages of lower floors only. `tests/project/test_imports.py` checks the imports against `FLOORS`
and `ONLY`, and the picture against the packages' docstrings.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FLOORS: list[tuple[str, ...]] = [
    ("utils",),
    ("run_folder",),
    ("config",),
    ("kernels", "data_prep"),
    ("platform",),
    ("parallel", "launch"),
    ("data", "optim", "mixers"),
    ("model", "analysis"),
    ("checkpoint",),
    ("runs",),
    ("evaluation", "conversion"),
    ("training",),
    ("planning", "bench"),
    ("commands",),
    ("cli",),
]
"""Packages from the bottom up. Packages of one floor do not import each other."""

ONLY: dict[str, set[str]] = {
    "kernels": set(),
    "kernels.bench": {"kernels", "utils"},
    "data_prep": {"utils"},
    "platform": {"utils", "config.schema"},
    "parallel": {"utils", "run_folder", "config.schema", "platform"},
    "launch": {"utils", "run_folder", "config", "data_prep.manifest", "data_prep.digest"},
    "analysis": {"utils", "run_folder", "config", "mixers.core.settings"},
    "data": {"utils", "config", "parallel", "platform", "data_prep"},
    "optim": {"utils", "config", "parallel", "platform"},
    "mixers": {"utils", "config.schema", "config.traits", "kernels", "parallel", "platform"},
    "checkpoint": {"utils", "config.schema", "run_folder", "parallel", "platform", "optim"},
}
"""Packages that import less than all lower floors: they stay usable without the rest, or fast to import."""

WIDTH, ROW, GAP, MARGIN = 1080, 58, 8, 12
LINE = 15
"""Sizes of the picture in pixels."""


def folder_of(package: str) -> Path:
    """Return the folder of a package, or the file of a module."""
    if package.split(".")[0] in ("kernels", "data_prep"):
        return ROOT / package.replace(".", "/")
    path = ROOT / "megatron_ext" / package
    return path if path.is_dir() else path.with_suffix(".py")


def lower_floors(package: str) -> set[str]:
    """Return the packages that a package may import."""
    if package in ONLY:
        return ONLY[package]
    level = next(level for level, floor in enumerate(FLOORS) if package in floor)
    return {name for floor in FLOORS[:level] for name in floor}


def purpose(package: str) -> str:
    """Return the first line of a package's docstring."""
    path = folder_of(package)
    file = path / "__init__.py" if path.is_dir() else path
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0].replace("`", "")


def picture() -> str:
    """Return the floors as SVG, the lowest at the bottom."""
    height = MARGIN + len(FLOORS) * (ROW + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for level, floor in enumerate(reversed(FLOORS)):
        width = (WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)) / len(floor)
        for index, package in enumerate(floor):
            x, y = MARGIN + index * (width + GAP), MARGIN + level * (ROW + GAP)
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{ROW}" rx="5" fill="#eef3f8" stroke="#5b7a99"/>'
            )
            parts.append(f'<text x="{x + 10:.0f}" y="{y + 19}" font-size="15" font-weight="bold">{package}</text>')
            for row, line in enumerate(textwrap.wrap(purpose(package), int(width / 6.6))[:2]):
                position = f'x="{x + 10:.0f}" y="{y + 37 + row * LINE}"'
                parts.append(f'<text {position} font-size="12" fill="#333333">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
