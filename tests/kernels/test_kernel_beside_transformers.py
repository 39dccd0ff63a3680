"""transformers asks for the version of any importable `kernels`. Our package must not be taken for Hugging Face's."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

import kernels

ROOT = Path(kernels.__file__).resolve().parents[1]

# The lowest version of Hugging Face's `kernels` that any transformers 5 (5.0.0) accepts. For an installed selectron,
# transformers reads selectron's own version instead. From this version on, it would take our package for theirs.
LOWEST_TAKEN = Version("0.9.0")

PROBE = """
import kernels
from transformers.utils.import_utils import is_kernels_available
assert not is_kernels_available()
print(kernels.__file__)
"""


def test_our_versions_stay_below_hugging_faces():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert Version(declared) < LOWEST_TAKEN
    assert Version(kernels.__version__) < LOWEST_TAKEN


def test_transformers_imports_beside_the_source_tree():
    """In this process, where the tests of exported models import transformers, too."""
    pytest.importorskip("transformers", minversion="5")
    from transformers.utils.import_utils import is_kernels_available

    import_module("transformers.integrations.hub_kernels")  # would fail here, importing names that our package lacks
    assert not is_kernels_available()


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
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")
