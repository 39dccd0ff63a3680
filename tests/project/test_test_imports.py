"""Imports between modules of the tests: each name exists, and each test file can be run alone."""

import ast
from pathlib import Path

import pytest
from syntax import statements

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
ADDED = (TESTS, TESTS / "distributed")
"""Folders that `tests/conftest.py` puts on the module search path of every test."""


def search_path(file: Path) -> set[Path]:
    """Return the folders that pytest searches when it collects a file alone: its own, and each with a conftest.py."""
    return {file.parent, *ADDED, *(folder for folder in file.parents if (folder / "conftest.py").exists())}


class Module:
    """Names of a module.

    Attributes:
        defined: names that it defines or imports, in blocks such as `if` and `try` as well.
        imports: each imported top-level module, with the names taken from it.
    """

    def __init__(self, file: Path) -> None:
        self.defined: set[str] = set()
        self.imports: list[tuple[str, list[str]]] = []
        for node in statements(file):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                self.defined.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.defined |= {name.id for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.defined |= {alias.asname or alias.name for alias in node.names}
                self.imports += imports(node)


def imports(node: ast.Import | ast.ImportFrom) -> list[tuple[str, list[str]]]:
    """Return each top-level module that a statement imports, with the names taken from it."""
    if isinstance(node, ast.Import):
        return [(alias.name, []) for alias in node.names]
    return [(node.module, [alias.name for alias in node.names])] if node.level == 0 and node.module else []


@pytest.fixture(scope="module")
def modules() -> dict[str, list[Path]]:
    by_name: dict[str, list[Path]] = {}
    for file in FILES:
        by_name.setdefault(file.stem, []).append(file)
    return by_name


def test_imports_between_tests_resolve(modules: dict[str, list[Path]]) -> None:
    found_in = {file: Module(file) for file in FILES}
    wrong = []
    for file in FILES:
        folders = search_path(file)
        for module, names in found_in[file].imports:
            if module not in modules:
                continue  # of another package
            found = [other for other in modules[module] if other.parent in folders]
            if not found:
                wrong.append(f"{file.relative_to(TESTS)}: {module} is not on its search path")
                continue
            wrong += [
                f"{file.relative_to(TESTS)}: no {name} in {module}"
                for name in names
                if not any(name in found_in[other].defined for other in found)
            ]
    assert wrong == []
