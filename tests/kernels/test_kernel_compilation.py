"""Every Triton kernel compiles for a Hopper GPU. Triton's interpreter, which the other tests use, accepts more code."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def launched_kernels() -> set[str]:
    """Return the names of Triton functions whose docstrings state a launch grid."""
    return {
        node.name
        for path in (ROOT / "kernels").rglob("triton_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list and "rid (" in (ast.get_docstring(node) or "")
    }


def test_every_kernel_compiles(request):
    # Kernels are compiled again after a change of their code, of Triton or of its options.
    compiled_before = request.config.cache.mkdir("compiled_kernels")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_DISABLE_LINE_INFO": "1",  # takes a fifth of the compiler's time, and only debuggers read it
        "TRITON_CACHE_DIR": str(compiled_before),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE.parent))),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_for_hopper.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,  # below the time limit of a test, as another test may run concurrently
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == launched_kernels()
