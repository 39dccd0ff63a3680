"""Embedded corpus: text of the Python installation and of its packages, for tests and examples without downloads.

The training domain `PythonDocs` contains Python's documentation topics, the docstrings of the standard library and of a
few documented packages, and the long descriptions of the installed packages. The out-of-domain test `PythonCode` is
source code of the standard library. Only the table of topics is imported; sources are parsed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import platform
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.documents import Advance, Document, Problems, ignore_progress
from megatron_ext.utils import gc_control

DOCS, CODE = "PythonDocs", "PythonCode"
DOCUMENTED_PACKAGES = ("matplotlib", "networkx", "numpy")
"""Dependencies of this project (directly or through torch) with long docstrings in English prose."""

MIN_CHARACTERS = 200
CODE_BYTES = 3_000_000
"""Bytes of source code: enough for a test domain, small compared to the training domain."""

# Test suites are repetitive, `encodings` and `pydoc_data` are tables, and bundled wheels are not sources.
EXCLUDED_PARTS = frozenset(
    {"test", "tests", "testing", "idle_test", "encodings", "pydoc_data", "_bundled", "__pycache__"}
    | {"site-packages", "dist-packages"}
)


class EmbeddedCorpus:
    """Corpus of the documents of both domains, in a fixed order, without exact duplicates."""

    folders: frozenset[str] = frozenset()
    units = 1

    @cached_property
    def all_documents(self) -> list[Document]:
        """Documents of both domains."""
        # Syntax trees contain no reference cycles, so a collection would find nothing and take a quarter of the time.
        with gc_control.paused():
            seen: set[str] = set()
            return [
                document
                for document in (*_topics(), *_docstrings(seen), *_descriptions(), *_source_code())
                if len(document.text) >= MIN_CHARACTERS and _is_new(document.text, seen)
            ]

    @property
    def total_bytes(self) -> int:
        """Return the UTF-8 bytes of all documents."""
        return sum(len(document.text.encode()) for document in self.all_documents)

    def documents(self, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield the documents; none can be malformed."""
        for document in self.all_documents:
            yield document
            advance(len(document.text.encode()))

    def read(self, unit: int, problems: Problems, advance: Advance = ignore_progress) -> Iterator[Document]:
        """Yield the documents; the corpus is a single unit."""
        return self.documents(problems, advance)

    def identity(self) -> str:
        """Return a digest of the texts."""
        digest = hashlib.sha256()
        for document in self.all_documents:
            digest.update(document.text.encode())
        return digest.hexdigest()

    def provenance(self) -> dict[str, Any]:
        """Return the Python version, and the number of documents by source."""
        return {
            "python": platform.python_version(),
            "documents": dict(Counter(document.source for document in self.all_documents)),
        }


def strip_docstrings(source: str, tree: ast.Module | None = None) -> str:
    """Remove the docstrings from source code, which remains valid Python.

    The docstrings are training text. In the code, they would make the out-of-domain test reward memorisation.

    Args:
        source: source code.
        tree: syntax tree of `source`; None: it is parsed here.

    Raises:
        SyntaxError: `source` does not parse.
    """
    lines = source.encode().split(b"\n")  # the parser counts columns in UTF-8 bytes
    holders = sorted(_docstring_holders(tree or ast.parse(source)), key=lambda node: node.body[0].lineno, reverse=True)
    for node in holders:
        statement = node.body[0]
        assert statement.end_lineno is not None
        before = lines[statement.lineno - 1][: statement.col_offset]
        after = lines[statement.end_lineno - 1][statement.end_col_offset :]
        is_only_statement = len(node.body) == 1 and not isinstance(node, ast.Module)
        replacement = b"pass" if is_only_statement or after.lstrip().startswith(b";") else b""
        joined = before + replacement + after
        lines[statement.lineno - 1 : statement.end_lineno] = [joined] if joined.strip() else []
    return b"\n".join(lines).decode()


_Holder = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of syntax tree nodes that hold lists of statements, or of nodes with such lists."""


def _docstring_holders(node: ast.AST) -> Iterator[_Holder]:
    """Yield the modules, classes and functions with a docstring at or below a node.

    Expressions, which are most of a tree, contain none and are not visited.
    """
    if isinstance(node, _Holder) and ast.get_docstring(node, clean=False) is not None:
        yield node
    for field in _BLOCKS:
        block = getattr(node, field, None)
        for child in block if isinstance(block, list) else ():
            yield from _docstring_holders(child)


def _is_new(text: str, seen: set[str]) -> bool:
    new = text not in seen
    seen.add(text)
    return new


def _topics() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave the table out
        return
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name].strip(), DOCS, "documentation topics")


def _docstrings(seen: set[str]) -> Iterator[Document]:
    for source, root, prefix in _documented_roots():
        for file in _python_files(root):
            module = _module_name(file, root, prefix)
            text = _module_documentation(file, module, seen)
            if text:
                yield Document(module, text, DOCS, source)


def _documented_roots() -> Iterator[tuple[str, Path, str]]:
    yield "docstrings of the standard library", _standard_library(), ""
    for package in DOCUMENTED_PACKAGES:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            yield f"docstrings of {package}", Path(found.origin).parent, package


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _python_files(root: Path) -> list[Path]:
    """Return the sorted sources under `root`; excluded folders are not visited."""
    files: list[Path] = []
    for entry in sorted(root.iterdir()):
        if entry.name in EXCLUDED_PARTS or entry.is_symlink():
            continue
        if entry.is_dir():
            files += _python_files(entry)
        elif entry.suffix == ".py":
            files.append(entry)
    return files


def _module_name(file: Path, root: Path, prefix: str) -> str:
    parts = [prefix, *file.relative_to(root).with_suffix("").parts]
    return ".".join(part for part in parts if part and part != "__init__") or file.stem


def _read_source(file: Path) -> tuple[str, ast.Module] | None:
    """Return text and syntax tree of a file; None for the deliberately broken files of some packages."""
    try:
        with tokenize.open(file) as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            source = stream.read()
            return source, ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _module_documentation(file: Path, module: str, seen: set[str]) -> str:
    """Return the docstrings of a module, each under its dotted name, without those seen elsewhere."""
    parsed = _read_source(file)
    if parsed is None:
        return ""
    parts = [f"{name}\n\n{text}" for name, text in _named_docstrings(parsed[1], module) if _is_new(text, seen)]
    return "\n\n".join(parts)


def _named_docstrings(node: _Holder, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text and text.strip():
        yield name, text.strip()
    for child in node.body:
        if isinstance(child, _Holder):
            yield from _named_docstrings(child, f"{name}.{child.name}")


def _descriptions() -> Iterator[Document]:
    """Yield the long descriptions of the installed packages, except this project's own."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        name = metadata["Name"] if metadata is not None else None
        if name and name.lower() != "selectron":
            body = metadata.json.get("description", "")
            found.setdefault(name.lower(), str(body).encode("utf-8", "replace").decode().strip())
    for name in sorted(found):
        yield Document(f"packages/{name}", found[name], DOCS, "descriptions of installed packages")


def _source_code() -> Iterator[Document]:
    """Yield modules of the standard library, drawn by a hash of their names until `CODE_BYTES` are reached."""
    root, total = _standard_library(), 0
    names = {_module_name(file, root, ""): file for file in _python_files(root)}
    sampled: list[tuple[str, str]] = []
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if total >= CODE_BYTES:
            break
        parsed = _read_source(names[name])
        if parsed is not None:
            sampled.append((name, strip_docstrings(*parsed).strip()))
            total += len(sampled[-1][1].encode())
    for name, text in sorted(sampled):
        yield Document(f"source/{name}", text, CODE, "source code of the standard library")
