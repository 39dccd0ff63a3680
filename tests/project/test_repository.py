"""Properties of the whole repository: short files and functions, no machine-specific paths, valid links."""

import ast
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from syntax import statements

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

# Assembled from parts, so that this file does not contain the forbidden words.
FORBIDDEN = [
    "pypi" + ".org",
    "files.python" + "hosted.org",
    "download." + "pytorch.org",
    "pypi." + "nvidia.com",
    "index" + "-url",
    "find" + "-links",
    "/wo" + "rk/",
    "../sh" + "ared",
    "/opt/" + "wheels",
    "file:" + "///",
]

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE_PATH = re.compile(r"`((?:examples|tools|docs|slurm|tests|megatron_ext|kernels|data_prep)/[\w./-]+\.\w+)`")


@cache
def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def test_file_lengths():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def function_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines from `def` to the last line, without the lines of the docstring."""
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return length
    docstring = function.body[0]
    return length - (docstring.end_lineno - docstring.lineno + 1)


def test_function_lengths():
    """Lines of the docstring do not count. Kernels are exempt: their steps share many local variables."""
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}": function_length(node)
        for path in python_files()
        if path.relative_to(ROOT).parts[0] != "kernels"
        for node in statements(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_nothing_names_a_package_index_or_one_machines_folders():
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked_files()
        if path.suffix not in {".png", ".bin", ".zst", ".gz"}
        for word in FORBIDDEN
        if word in path.read_text(encoding="utf-8", errors="replace")
    ]
    assert not found, "\n" + "\n".join(found)


def test_links_in_documents_exist():
    broken = []
    for document in (path for path in tracked_files() if path.suffix == ".md"):
        text = document.read_text(encoding="utf-8")
        targets = [(document.parent, link) for link in LINK.findall(text) if "://" not in link]
        targets += [(ROOT, path) for path in CODE_PATH.findall(text)]
        broken += [f"{document.relative_to(ROOT)}: {t}" for folder, t in targets if not (folder / t).exists()]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("folder", ["examples", "examples/study"])
def test_every_example_is_described(folder):
    described = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    examples = sorted(path.name for path in (ROOT / folder).glob("*.yaml"))
    assert examples
    assert [name for name in examples if f"`{name}`" not in described] == []
    mentioned = set(re.findall(r"`([\w.-]+\.(?:yaml|sh))`", described)) - {"config.yaml"}
    assert [name for name in sorted(mentioned) if not (ROOT / folder / name).exists()] == []


@pytest.mark.parametrize(
    ("file", "megatron"), [("constraints.txt", "0.16.1"), ("constraints-py312.txt", "0.19.2")], ids=lambda value: value
)
def test_versions_are_pinned_exactly(file, megatron):
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    assert {"torch==2.13.0", f"megatron-core=={megatron}"} <= set(lines)
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)] == []
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    (listed,) = re.findall(r"^packages=\((.*?)^\)", (ROOT / "tools/install_loggers.sh").read_text(), re.S | re.M)
    assert {"wandb", "mlflow-skinny", "trackio"} <= set(listed.split())
    assert {name.replace("_", "-") for name in listed.split()} <= pinned
