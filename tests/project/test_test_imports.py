"""Imports between modules of the tests: each name exists, and each test file can be run alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
ADDED = (TESTS, TESTS / "distributed")
"""Folders that `tests/conftest.py` puts on the module search path of every test."""


def search_path(file: Path) -> set[Path]:
    """Return the folders that pytest searches when it collects a file alone: its own, and each with a conftest.py."""
    return {file.parent, *ADDED, *(folder for folder in file.parents if (folder / "conftest.py").exists())}


def defined_names(file: Path) -> set[str]:
    """Return the names that a module defines or imports at its top level, in blocks such as `if` and `try` as well."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def imports(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each imported top-level module with the names taken from it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)


@pytest.fixture(scope="module")
def modules() -> dict[str, list[Path]]:
    by_name: dict[str, list[Path]] = {}
    for file in FILES:
        by_name.setdefault(file.stem, []).append(file)
    return by_name


def test_imports_between_tests_resolve(modules: dict[str, list[Path]]) -> None:
    defined = {file: defined_names(file) for file in FILES}
    wrong = []
    for file in FILES:
        folders = search_path(file)
        for module, names in imports(file):
            if module not in modules:
                continue  # of another package
            found = [other for other in modules[module] if other.parent in folders]
            if not found:
                wrong.append(f"{file.relative_to(TESTS)}: {module} is not on its search path")
                continue
            wrong += [
                f"{file.relative_to(TESTS)}: no {name} in {module}"
                for name in names
                if not any(name in defined[other] for other in found)
            ]
    assert wrong == []
