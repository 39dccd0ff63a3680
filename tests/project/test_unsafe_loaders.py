"""List of all places that could run code from a file or a peer, with the reason why each does not.

A new place fails until it is listed. Check what it loads, and who may have written that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("megatron_ext", "kernels", "data_prep", "tools", "examples", "slurm")

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "runpy"}
"""Modules whose import is a finding by itself."""

BUILTINS = {"eval", "exec", "compile", "__import__"}

ATTRIBUTES = {
    *("torch.load", "torch.jit.load", "np.load", "numpy.load", "torch.hub.load"),
    *("os.system", "os.popen", "importlib.import_module", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("multiprocessing.get_context", "multiprocess.get_context"),
}
"""Functions called as module.name."""

NAMES = {
    *("YAML", "load_yaml", "TaskManager", "load_dataset", "from_pretrained", "from_config", "FileSystemReader"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "load_state_dict_from_url", "read_metadata", "load_sharded_metadata", "load_bytes"),
    *("load_common", "load_common_state_dict", "load_tensors_metadata", "get_filesystem_reader", "from_file"),
}
"""Names that are called or inherited, with any prefix."""

KEYWORDS = {"trust_remote_code", "shell", "pickle_module", "allow_pickle", "weights_only"}
"""Arguments that permit code to run. False (for weights_only: True) is not a finding."""

_CHECKPOINT = "megatron_ext/checkpoint"
_SAFE_YAML = 'typ="safe" makes plain values alone'
_OWN_WORKERS = "processes that this one starts, over pipes that it made"
_TOKENIZER = "JSON that a parser in Rust reads: regular expressions and tables, no code"
_RESTRICTED = "megatron_ext.checkpoint.restricted_pickle: names of an exact list, no calls of others"

REASONS: dict[tuple[str, str], str] = {
    ("megatron_ext/config/yaml_text.py", "YAML"): _SAFE_YAML,
    ("megatron_ext/config/yaml_text.py", "yaml.load"): _SAFE_YAML,
    ("megatron_ext/config/save.py", "YAML"): "writes",
    ("megatron_ext/bench/loader/run.py", "multiprocessing.get_context"): _OWN_WORKERS,
    ("megatron_ext/bench/prepare/contestants.py", "multiprocessing.get_context"): _OWN_WORKERS,
    ("megatron_ext/planning/counts.py", "multiprocessing.get_context"): _OWN_WORKERS,
    ("data_prep/running/execution.py", "multiprocess.get_context"): _OWN_WORKERS,
    ("megatron_ext/bench/prepare/contestants.py", "from_file"): _TOKENIZER,
    ("data_prep/tokenization/folders.py", "from_file"): _TOKENIZER,
    (
        "megatron_ext/conversion/huggingface/model.py",
        "from_pretrained",
    ): "of a configuration's class, which the family names; "
    "config.json is plain values, and its auto_map is followed by the Auto classes alone",
    ("megatron_ext/conversion/megatron/torch_dist.py", "read_metadata"): _RESTRICTED,
    (f"{_CHECKPOINT}/common_state.py", "read_metadata"): _RESTRICTED,
    (f"{_CHECKPOINT}/reading.py", "read_metadata"): _RESTRICTED,
    (f"{_CHECKPOINT}/reading.py", "class of FileSystemReader"): "what torch's unpickles is overridden: " + _RESTRICTED,
    ("megatron_ext/commands/doctor.py", "import runpy"): "runs a file of this package, by its path",
    ("megatron_ext/evaluation/fewshot/tasks.py", "load_yaml"): "of a file of the installed lm-eval",
    (
        "megatron_ext/evaluation/fewshot/tasks.py",
        "TaskManager",
    ): "tasks are code: lm-eval's, and those of "
    "the folder that the user names for it (fewshot.include_path); no run's or checkpoint's files are among them",
    ("data_prep/reading/tables.py", "read_metadata"): "Parquet's, which pyarrow reads",
    ("megatron_ext/utils/registration.py", "importlib.import_module"): "modules of one package of ours",
    ("data_prep/contamination/arrays.py", "np.load"): "allow_pickle=False",
    ("data_prep/reading/indexed.py", "np.load"): "numpy unpickles nothing unless it is asked to",
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((f"import {a.name}", node.lineno) for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"import {node.module}", node.lineno
        elif isinstance(node, ast.Call):
            yield from ((name, node.lineno) for name in called(node))
        elif isinstance(node, ast.ClassDef):
            bases = [dotted(base).split(".")[-1] for base in node.bases]
            yield from ((f"class of {base}", node.lineno) for base in bases if base in NAMES)
        elif isinstance(node, ast.Attribute) and dotted(node) in ATTRIBUTES:
            yield dotted(node), node.lineno  # passed on and called elsewhere


def called(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    if name in BUILTINS or name.split(".")[-1] in NAMES:
        yield name.split(".")[-1]
    for keyword in call.keywords:
        harmless = keyword.arg == "weights_only"
        is_harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is harmless
        if keyword.arg in KEYWORDS and not is_harmless:
            yield f"{keyword.arg}="


def found() -> dict[tuple[str, str], list[int]]:
    everything: dict[tuple[str, str], list[int]] = {}
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            for what, line in findings(ast.parse(path.read_text(encoding="utf-8"))):
                everything.setdefault((str(path.relative_to(ROOT)), what), []).append(line)
    return everything


def test_every_place_is_listed() -> None:
    there = found()
    new = {f"{file}:{lines[0]}: {what}" for (file, what), lines in there.items() if (file, what) not in REASONS}
    assert not new, "say in REASONS why nobody's code runs there"
    assert not REASONS.keys() - there.keys(), "listed, and no longer there"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import pickle", "import pickle"),
        ("from dill import load", "import dill"),
        ("torch.load(f, weights_only=False)", "torch.load"),
        ("torch.load(f, weights_only=False)", "weights_only="),
        ("loader = torch.load", "torch.load"),
        ("np.load(f, allow_pickle=True)", "allow_pickle="),
        ("np.load(f, allow_pickle=wanted)", "allow_pickle="),
        ("AutoTokenizer.from_pretrained(f, trust_remote_code=True)", "trust_remote_code="),
        ("subprocess.run(command, shell=True)", "shell="),
        ("os.system(command)", "os.system"),
        ("eval(text)", "eval"),
        ("yaml.load(text)", "yaml.load"),
        ("class Reader(filesystem.FileSystemReader): pass", "class of FileSystemReader"),
        ("dist.all_gather_object(values, value)", "all_gather_object"),
    ],
)
def test_the_scan_sees(line: str, what: str) -> None:
    assert what in {name for name, _ in findings(ast.parse(line))}


@pytest.mark.parametrize("line", ["model.eval()", "f(allow_pickle=False)", "g(weights_only=True)", "evaluate(a)"])
def test_the_scan_passes_over(line: str) -> None:
    assert not {name for name, _ in findings(ast.parse(line))}
