"""Import layers: imports point from the command down to the kernels, without cycles.

A *room* is a folder or a file of `megatron_ext`, or another package of ours. The table lists the rooms that each room
may import. Any other import fails. Imports inside functions and for type checking count as well, because they are
dependencies, too.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron_ext", "kernels", "data_prep")

BOTTOM = {"errors", "files", "scratch", "signals", "reports", "source", "config.schema"} | {
    *("credentials", "json_text", "paths", "printable", "ratio"),
}
"""Modules that every room but the kernels may import: user errors, atomic file writes, temporary folders and signal
handlers, tables, the commit, the schema, checks of untrusted paths, JSON, addresses and text, and intervals over
documents."""

LOW = {"parallel", "kernels", "platform"}
LEAVES = {"config", "data", "optim"}
MODEL = LOW | LEAVES | {"mixers", "specs", "model", "meta_device"}

# A room may import the rooms below it. Rooms of the same level do not import each other.
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "kernels.bench": {"kernels"},
    "megatron_cpu": set(),
    "credentials": set(),
    "errors": set(),
    "events": set(),
    "files": set(),
    "garbage": set(),
    "json_text": set(),
    "meta_device": set(),
    "paths": set(),
    "printable": set(),
    "scratch": {"signals"},
    "signals": set(),
    "reports": set(),
    "source": set(),
    "ratio": set(),
    "heartbeat": set(),
    "run_folder": set(),
    "platform": {"megatron_cpu"},
    "parallel": {"platform", "heartbeat"},
    "mixers": LOW,
    "block_layer": set(),
    "rwkv7_block": LOW | {"mixers", "block_layer"},
    "specs": LOW | {"mixers", "rwkv7_block", "block_layer"},
    "output_layer": {"kernels"},
    "model_parts": {"parts"},
    "parts": set(),
    "model": LOW | {"mixers", "specs", "output_layer"},
    # Leaves: they import no other room.
    "config": set(),
    "data": {"data_prep.manifest", "data_prep.digest"},
    "optim": {"platform", "parallel"},
    "data_prep": set(),
    # Rooms that work on a model.
    "checkpoint": MODEL,
    "evaluation": MODEL | {"data_prep.manifest", "data_prep.documents", "data_prep.reading"},
    # Rooms that make or use runs.
    "training": MODEL
    | {"checkpoint", "evaluation", "heartbeat", "run_folder", "data_prep.manifest", "data_prep.tokenization"},
    # It counts what training builds, as training builds it, for runs that launch reads from a file and begins.
    # A planned step has the same parts.
    "planning": MODEL
    | {"checkpoint", "evaluation", "training.build", "training.trainer", "launch.sweep_file", "data_prep.manifest"}
    | {"model_parts", "parts", "output_layer"},
    "analysis": {"config", "events"},
    "launch": {"config", "events", "heartbeat", "run_folder", "data_prep.manifest", "data_prep.digest"},
    "lone_mixer": MODEL,
    "diagnosis": MODEL | {"lone_mixer"},
    # It starts ranks as the command does, and reads their output.
    "bench": MODEL
    | {"model_parts", "parts", "lone_mixer", "checkpoint", "garbage", "training", "data_prep"}
    | {"launch.local", "launch.reporting"},
    "evaluate": MODEL | {"training", "evaluation"},
    "generate": MODEL | {"training", "evaluation"},
    "arguments": {"launch.reporting", "launch.resuming"},
    "commands": {"platform", "diagnosis"},
    # The command imports everything.
    "cli": MODEL
    | {
        "arguments",
        "commands",
        "training",
        "planning",
        "launch",
        "analysis",
        "checkpoint",
        "evaluation",
        "data_prep",
        "diagnosis",
        "garbage",
        "generate",
        "evaluate",
        "bench",
    },
}

COPIED = ROOT / "megatron_ext" / "checkpoint" / "conversion" / "selectron_hf"
"""Modules copied into a converted checkpoint. They import each other relatively, and little else."""

WHOLE_CONFIGURATION = "RunConfig"
READERS = {"config", "training", "planning", "launch", "bench", "cli"}
"""Rooms that may read the whole configuration of a run. Lower rooms get only their part of it."""


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in source_files()}


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the dotted names that a file imports, with the line. `from a import b` gives a.b if that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    """Return the room of one of our modules: `megatron_ext.mixers.base` -> `mixers`, `kernels.dispatch` -> `kernels`.

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


def test_every_room_stands_in_the_table():
    rooms = {room_of(module) for module in modules()} - {"megatron_ext"}
    assert rooms <= set(ALLOWED), f"new rooms, not in the table: {sorted(rooms - set(ALLOWED))}"


def test_imports_point_one_way():
    wrong = []
    for path in source_files():
        room = room_of(module_of(path))
        allowed = ALLOWED.get(room, set()) | (BOTTOM if room != "kernels" else set())
        for name, line in edges_out_of(path):
            if not allows(allowed, name):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {name}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_table_itself_has_no_circle():
    rooms = {room: {entry.split(".")[0] for entry in allowed} for room, allowed in ALLOWED.items()}
    TopologicalSorter(rooms).prepare()


def test_no_circle_between_modules():
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


def test_kernels_and_data_preparation_do_without_megatron():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in source_files()
        if room_of(module_of(path)) in {"kernels", "kernels.bench", "data_prep"} and path != TOKEN_FILES
        for name, line in imported(path)
        if name.split(".")[0] == "megatron"
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_files_that_are_copied_need_torch_and_transformers_alone():
    allowed = {"torch", "transformers"} | sys.stdlib_module_names
    found = {(path.name, name) for path in COPIED.glob("*.py") for name, _line in imported(path)}
    assert found
    inside = module_of(COPIED) + "."
    assert {(file, name) for file, name in found if name.split(".")[0] not in allowed and inside not in name} == set()
    outside = {(path, name) for path in source_files() if path.parent != COPIED for name, _line in imported(path)}
    family = COPIED.parent / "families" / "selectron.py"
    assert {path for path, name in outside if name.startswith(inside)} <= {family}


def test_nothing_below_training_reads_the_whole_configuration():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in source_files()
        if room_of(module_of(path)) not in READERS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and any(alias.name == WHOLE_CONFIGURATION for alias in node.names)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_rules_see_what_they_are_for(tmp_path):
    """Upward imports are found, also inside a function and under another name."""
    source = tmp_path / "module.py"
    source.write_text(
        "import megatron_ext.training.trainer as t\n"
        "def late():\n    from megatron_ext import model\n"
        "from kernels.dispatch import choose\n"
    )
    assert sorted(imported(source)) == [
        ("kernels.dispatch", 4),
        ("megatron_ext.model", 3),
        ("megatron_ext.training.trainer", 1),
    ]
    assert not allows(ALLOWED["mixers"], "megatron_ext.training.trainer")
    assert not allows(ALLOWED["mixers"], "megatron_ext.model")
    assert allows(ALLOWED["mixers"], "kernels.dispatch")
    assert allows(BOTTOM, "megatron_ext.config.schema")
    assert not allows(BOTTOM, "megatron_ext.config.load")
