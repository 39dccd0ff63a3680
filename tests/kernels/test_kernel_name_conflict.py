"""Owner of the import name `kernels` by metadata alone: before and after an install, with and without shadowing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import name_conflict

ROOT = Path(name_conflict.__file__).resolve().parents[1]


def install(folder, name, *, record=(), top_level=None, package=False):
    """Write the files that pip leaves: a dist-info folder and optionally a package."""
    info = folder / f"{name or 'nameless'}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + (f"Name: {name}\n" if name else "") + "Version: 1.2\n")
    (info / "RECORD").write_text("".join(f"{line},,\n" for line in record))
    if top_level is not None:
        (info / "top_level.txt").write_text(top_level)
    if package:
        (folder / "kernels").mkdir()
        (folder / "kernels" / "__init__.py").write_text("raise RuntimeError('the foreign package was imported')\n")
    return folder


def run(arguments, *, pythonpath, cwd=ROOT):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, pythonpath)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("kernels", {"record": ["kernels/__init__.py", "kernels/layer.py"]}),
        ("hf_Kernels", {"record": ["kernels/__init__.py"]}),
        ("single-file", {"record": ["kernels.py"]}),
        ("compiled", {"record": ["kernels.cpython-311-x86_64-linux-gnu.so"]}),
        ("declared", {"top_level": "other\nkernels\n"}),
        ("Kernels", {"record": ["__editable__.kernels-1.2.pth"]}),
    ],
)
def test_foreign_distribution_is_reported_with_the_fix(tmp_path, name, files):
    path = [str(install(tmp_path, name, **files))]
    assert name_conflict.foreign_distributions(path) == [name]
    line = name_conflict.find_conflict(path)
    assert line is not None
    assert f"'{name}'" in line
    assert f"pip uninstall {name}" in line
    assert "\n" not in line
    with pytest.raises(name_conflict.ForeignKernelsError, match=f"pip uninstall {name}"):
        name_conflict.check_ownership(path)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("selectron", {"record": ["kernels/__init__.py"], "top_level": "kernels\nmegatron_ext\n"}),
        ("Selectron", {"record": ["__editable___selectron_finder.py"], "top_level": "kernels\n"}),
        ("numkernels", {"record": ["numkernels/kernels/__init__.py", "kernels_data/x.py", "kernelspy.py"]}),
        (None, {"record": ["other/__init__.py"]}),
    ],
)
def test_selectron_and_unrelated_distributions_are_accepted(tmp_path, name, files):
    path = [str(install(tmp_path, name, **files))]
    assert name_conflict.foreign_distributions(path) == []
    name_conflict.check_ownership(path)


def test_distribution_without_a_name_is_reported_by_its_path(tmp_path):
    install(tmp_path, None, record=["kernels/__init__.py"])
    assert name_conflict.foreign_distributions([str(tmp_path)]) == [str(tmp_path / "kernels")]


def test_several_distributions_are_reported_once_each(tmp_path):
    for folder in ("a", "b"):
        install(tmp_path / folder, "kernels", record=["kernels/__init__.py"])
    install(tmp_path / "c", "also", record=["kernels/__init__.py"])
    assert name_conflict.foreign_distributions([str(tmp_path / x) for x in "abc"]) == ["also", "kernels"]


def test_the_command_in_the_source_tree(tmp_path):
    done = run(["-S", "-m", "kernels.name_conflict"], pythonpath=[])
    assert (done.returncode, done.stderr) == (0, "")
    install(tmp_path, "kernels", record=["kernels/__init__.py"], package=True)
    done = run(["-S", "-m", "kernels.name_conflict"], pythonpath=[tmp_path])
    assert done.returncode == 2
    assert done.stderr.startswith("error: the installed distribution 'kernels' also provides")
    assert done.stderr.count("\n") == 1


def test_the_file_by_its_path_when_the_foreign_package_comes_first(tmp_path):
    install(tmp_path, "kernels", record=["kernels/__init__.py"], package=True)
    done = run(["-S", ROOT / "kernels" / "name_conflict.py"], pythonpath=[tmp_path], cwd=tmp_path)
    assert done.returncode == 2
    assert "pip uninstall kernels" in done.stderr


def test_a_foreign_folder_without_a_distribution(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    done = run(["-S", ROOT / "kernels" / "name_conflict.py"], pythonpath=[tmp_path, ROOT], cwd=tmp_path)
    assert done.returncode == 2
    assert str(tmp_path / "kernels" / "__init__.py") in done.stderr
    # A plain folder of that name, such as tests/kernels, does not shadow the package.
    (tmp_path / "kernels" / "__init__.py").unlink()
    done = run(["-S", ROOT / "kernels" / "name_conflict.py"], pythonpath=[tmp_path], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
