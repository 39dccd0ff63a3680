"""transformers asks for the version of any importable `kernels`. Our package must not be taken for Hugging Face's."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import kernels

ROOT = Path(kernels.__file__).resolve().parents[1]

# The lowest version of Hugging Face's `kernels` that any transformers 5 (5.0.0) accepts. For an installed selectron,
# transformers reads selectron's own version instead. From this version on, it would take our package for theirs.
LOWEST_TAKEN = Version("0.9.0")

PROBE = """
import kernels, transformers
from transformers.utils.import_utils import is_kernels_available
import transformers.integrations.hub_kernels
assert not is_kernels_available()
print(kernels.__file__)
"""


def probe(pythonpath, cwd):
    environment = os.environ | {"PYTHONPATH": str(pythonpath), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_our_versions_stay_below_hugging_faces():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert Version(declared) < LOWEST_TAKEN
    assert Version(kernels.__version__) < LOWEST_TAKEN


def test_transformers_imports_beside_the_source_tree(tmp_path):
    pytest.importorskip("transformers", minversion="5")
    done = probe(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == kernels.__file__


def test_transformers_imports_beside_an_installed_selectron(tmp_path):
    pytest.importorskip("transformers", minversion="5")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (tmp_path / "kernels").mkdir()
    # Without __version__, transformers must find the version in the metadata.
    (tmp_path / "kernels" / "__init__.py").touch()
    info = tmp_path / f"selectron-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: selectron\nVersion: {version}\n")
    (info / "top_level.txt").write_text("kernels\nmegatron_ext\ndata_prep\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    done = probe(tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")
