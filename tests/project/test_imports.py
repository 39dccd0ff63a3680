"""Import layers: imports point from the command down to the helpers, without cycles.

A *room* is a folder or a file of `megatron_ext`, or another package of ours. `tools/architecture.py` lists the floors
of rooms: a room may import rooms of lower floors. Imports inside functions and for type checking count as well, because
they are dependencies, too.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import architecture
import pytest
from architecture import FLOORS, lower_floors
from syntax import statements

ROOT = architecture.ROOT
PACKAGES = ("megatron_ext", "kernels", "data_prep")

COPIED = ROOT / "megatron_ext" / "conversion" / "huggingface" / "selectron_hf"
"""Modules copied into a converted checkpoint. They import each other relatively, and little else."""

WHOLE_CONFIGURATION = "RunConfig"
WITHOUT_IT = {"kernels", "data_prep", "platform", "parallel", "data", "optim", "mixers", "checkpoint", "analysis"}
"""Rooms that do not read the whole configuration of a run. They get only their part of it."""


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in source_files()}


@cache
def imported(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the dotted names that a file imports, with the line. `from a import b` gives a.b if that is a module."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = path.parent == COPIED and node.level == 1
            assert node.level == 0 or relative, f"{path}:{node.lineno}: imports are absolute here"
            module = f"{module_of(path.parent)}.{node.module}" if node.level else node.module
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield (inner if inner in modules() else module), node.lineno


def room_of(module: str) -> str:
    """Return the room of one of our modules: `megatron_ext.mixers.core.base` -> `mixers`.

    The benchmark of the kernels is a separate room: it writes reports, while the kernels import nothing of ours.
    """
    first, *rest = module.split(".")
    if [first, *rest[:1]] == ["kernels", "bench"]:
        return "kernels.bench"
    return first if first != "megatron_ext" else (rest[0] if rest else "megatron_ext")


def is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def allows(allowed: set[str], module: str) -> bool:
    name = module.removeprefix("megatron_ext.")
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


def edges_out_of(path: Path) -> list[tuple[str, int]]:
    """Imports of our own modules in other rooms than the file's."""
    room = room_of(module_of(path))
    return [(name, line) for name, line in imported(path) if is_ours(name) and room_of(name) != room]


def test_every_package_has_a_floor():
    rooms = {room_of(module) for module in modules()} - {"megatron_ext", "kernels.bench"}
    named = [room for floor in FLOORS for room in floor]
    assert sorted(named) == sorted(rooms)


def test_imports_point_to_lower_floors():
    wrong = []
    for path in source_files():
        room = room_of(module_of(path))
        if room == "megatron_ext":
            continue
        for name, line in edges_out_of(path):
            if not allows(lower_floors(room), name):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {name}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_picture_is_current():
    stored = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert stored == architecture.picture(), "run: python tools/architecture.py docs/architecture.svg"


def test_no_import_cycles():
    graph = {
        module: {name for name, _line in imported(path) if name in modules() and not module.startswith(f"{name}.")}
        for module, path in modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " -> ".join(error.args[1]))


TOKEN_FILES = ROOT / "data_prep" / "reading" / "indexed.py"
"""Reader and writer of Megatron's token files, imported only for such files."""


def test_kernels_and_data_prep_do_not_import_megatron():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in source_files()
        if room_of(module_of(path)) in {"kernels", "kernels.bench", "data_prep"} and path != TOKEN_FILES
        for name, line in imported(path)
        if name.split(".")[0] == "megatron"
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_copied_files_import_only_torch_and_transformers():
    allowed = {"torch", "transformers"} | sys.stdlib_module_names
    found = {(path.name, name) for path in COPIED.glob("*.py") for name, _line in imported(path)}
    assert found
    inside = module_of(COPIED) + "."
    assert {(file, name) for file, name in found if name.split(".")[0] not in allowed and inside not in name} == set()
    outside = {(path, name) for path in source_files() if path.parent != COPIED for name, _line in imported(path)}
    family = COPIED.parent / "families" / "selectron.py"
    assert {path for path, name in outside if name.startswith(inside)} <= {family}


def test_parts_do_not_read_the_whole_configuration():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in source_files()
        if room_of(module_of(path)) in WITHOUT_IT
        for node in statements(path)
        if isinstance(node, ast.ImportFrom) and any(alias.name == WHOLE_CONFIGURATION for alias in node.names)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_import_rules_detect_violations(tmp_path):
    """Upward imports are found, also inside a function and under another name."""
    source = tmp_path / "module.py"
    source.write_text(
        "import megatron_ext.training.trainer as t\n"
        "def late():\n    from megatron_ext import model\n"
        "from kernels.common.dispatch import choose\n"
    )
    assert sorted(imported(source)) == [
        ("kernels.common.dispatch", 4),
        ("megatron_ext.model", 3),
        ("megatron_ext.training.trainer", 1),
    ]
    assert not allows(lower_floors("mixers"), "megatron_ext.training.trainer")
    assert not allows(lower_floors("mixers"), "megatron_ext.model.build")
    assert not allows(lower_floors("mixers"), "megatron_ext.data.shards")
    assert allows(lower_floors("mixers"), "kernels.common.dispatch")
    assert allows(lower_floors("mixers"), "megatron_ext.config.schema")
    assert not allows(lower_floors("mixers"), "megatron_ext.config.load")
