import ast
from pathlib import Path

import pytest

from data_prep.documents import Problems
from data_prep.reading import embedded
from data_prep.reading.embedded import CODE, DOCS, EmbeddedCorpus, strip_docstrings

SOURCE = '''"""Module text é."""  # kept
import os

class Empty(Exception):
    """Only text."""

class Full:
    """Text
    over lines."""

    x = "not a docstring"

    async def f(self): "one line é"; return 1

    def g(self):
        \'\'\'Text.\'\'\'
        """A second string is no docstring."""
        return """kept"""
'''

STRIPPED = '''  # kept
import os

class Empty(Exception):
    pass

class Full:

    x = "not a docstring"

    async def f(self): pass; return 1

    def g(self):
        """A second string is no docstring."""
        return """kept"""
'''


def test_strip_docstrings():
    assert strip_docstrings(SOURCE) == STRIPPED


def all_docstrings(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [doc for doc in found if doc]


@pytest.mark.parametrize("module", ["argparse", "ast", "decimal", "json.decoder", "threading", "typing"])
def test_stripped_standard_library_is_the_same_program(module):
    path = Path(ast.__file__).parent / (module.replace(".", "/") + ".py")
    source = path.read_text("utf-8")
    text = strip_docstrings(source)
    stripped = ast.parse(text)
    assert all(doc not in text for doc in all_docstrings(ast.parse(source)) if len(doc) > 60)

    expected = ast.parse(source)
    for node in ast.walk(expected):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    assert ast.dump(stripped) == ast.dump(expected)


@pytest.fixture
def small_library(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "lib"
    for name in ("one.py", "pkg/__init__.py", "pkg/two.py", "test/test_one.py", "site-packages/other.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        body = f'"""About {name}. {"Words. " * 50}"""\n\ndef f():\n    """{"Shared text. " * 20}"""\n    return 1\n'
        (root / name).write_text(body + "".join(f"value_{i} = {i}\n" for i in range(40)) + f"name = {name!r}\n")
    (root / "broken.py").write_text("def (:\n")
    monkeypatch.setattr(embedded, "_standard_library", lambda: root)
    monkeypatch.setattr(embedded, "DOCUMENTED_PACKAGES", ())
    return root


def test_documents_of_a_package(small_library):
    documents = EmbeddedCorpus().all_documents
    docs = {item.id: item.text for item in documents if item.source == "docstrings of the standard library"}
    code = {item.id: item.text for item in documents if item.domain == CODE}
    assert sorted(docs) == ["one", "pkg", "pkg.two"]
    assert docs["one"].startswith("one\n\nAbout one.py.")
    assert [text.count("Shared text") for text in docs.values()] == [20, 0, 0]  # only at its first occurrence
    assert sorted(code) == ["source/one", "source/pkg", "source/pkg.two"]
    assert not any("About" in text or "Shared" in text for text in code.values())


@pytest.mark.slow
def test_embedded_corpus():
    corpus = EmbeddedCorpus()
    documents = list(corpus.documents(Problems()))
    size = {name: sum(len(item.text) for item in documents if item.domain == name) for name in (DOCS, CODE)}
    assert size[DOCS] > 2_000_000
    assert 2_500_000 < size[CODE] < 3_500_000
    assert len({item.text for item in documents}) == len(documents)
    assert len({item.id for item in documents}) == len(documents)
    assert sum(corpus.provenance()["documents"].values()) == len(documents)
    assert corpus.total_bytes == sum(len(item.text.encode()) for item in documents)
    code = [item.text for item in documents if item.domain == CODE]
    assert not any(all_docstrings(ast.parse(text)) for text in code[::4])
