"""Scripts behind `make install` and `make demo`, with fakes of commands that take minutes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIXERS = ["attention", "top1_chunk", "gated_deltanet"]

# Records its calls and creates the files of the real command.
FAKE_SELECTRON = """#!/usr/bin/env bash
echo "$*" >>calls
[ "$1" != "${FAILS_AT:-none}" ] || exit "${CODE:-2}"
case $1 in
prepare) mkdir -p runs/quickstart/data && touch runs/quickstart/data/manifest.json ;;
train) for word in "$@"; do case $word in run.name=*) mkdir -p "runs/quickstart/${word#*=}" ;; esac; done ;;
esac
[ "$1" != "${WAITS_AT:-none}" ] || { trap 'exit 75' INT; touch waiting; while :; do sleep 0.05; done; }
"""


# In place of an environment's python: answers the script's questions and writes down what pip is asked for.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*print*) echo {version}.0 ;;
*">= (3, 12)"*) [ {version} = 3.11 ] ;;
*torch.cuda*) exit {no_cuda} ;;
"-m pip"*) echo "$*" >>pip-calls; cp .venv/constraints.txt seen-constraints ;;
"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; echo "$*" >>venv-calls ;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def demo_folder(tmp_path):
    """Folder with a copy of the demo script, a fake `selectron`, and a fake python that counts two GPUs."""
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "quickstart.sh", tmp_path / "examples")
    script(tmp_path / ".venv" / "bin" / "selectron", FAKE_SELECTRON)
    script(tmp_path / ".venv" / "bin" / "python", "#!/bin/sh\necho 2\n")
    return tmp_path


def demo(demo_folder, **environment):
    done = subprocess.run(
        ["examples/quickstart.sh"],
        cwd=demo_folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    calls = (demo_folder / "calls").read_text().splitlines()
    (demo_folder / "calls").unlink()
    return done, calls


def train_call(mixer):
    how = "--resume=auto"  # an earlier call may have left a run, with or without a checkpoint
    return f"train examples/quickstart.yaml --processes 2 model.pattern={mixer}*4 run.name={mixer} {how}"


REPORT = "report " + " ".join(f"runs/quickstart/{mixer}" for mixer in MIXERS) + " --output runs/quickstart/report"


def test_demo_prepares_trains_and_reports(demo_folder):
    done, calls = demo(demo_folder)
    assert done.returncode == 0, done.stderr
    prepare = "prepare --input embedded --output runs/quickstart/data"
    assert calls == [prepare, *map(train_call, MIXERS), REPORT]
    assert f"$ selectron {prepare}" in done.stdout
    assert "'model.pattern=top1_chunk*4'" in done.stdout, "a star must survive the shell that it is copied to"
    assert [line.split("]")[0] for line in done.stdout.splitlines() if line.startswith("[")] == [
        f"[{i}/5" for i in range(1, 6)
    ]


def test_a_second_demo_keeps_what_is_there(demo_folder):
    demo(demo_folder)
    done, calls = demo(demo_folder)
    assert done.returncode == 0, done.stderr
    assert calls == [*map(train_call, MIXERS), REPORT]
    assert "runs/quickstart/data exists and is kept" in done.stdout


def test_demo_ends_with_the_error_of_its_first_failing_command(demo_folder):
    done, calls = demo(demo_folder, FAILS_AT="train")
    assert done.returncode == 2
    assert calls[-1] == train_call("attention")


def test_demo_of_which_a_run_is_stopped_says_how_to_go_on(demo_folder):
    """Simulate a SIGTERM to the training command only."""
    done, calls = demo(demo_folder, FAILS_AT="train", CODE="75")
    assert done.returncode == 75
    assert "make demo continues from here" in done.stdout
    assert calls[-1] == train_call("attention")


def test_demo_interrupted_starts_nothing_more(demo_folder):
    running = subprocess.Popen(
        ["examples/quickstart.sh"],
        cwd=demo_folder,
        env=os.environ | {"WAITS_AT": "train"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (demo_folder / "waiting").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        output, _ = running.communicate(timeout=120)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130
    assert "make demo continues from here" in output
    assert (demo_folder / "calls").read_text().splitlines()[-1] == train_call("attention")


@pytest.fixture
def source(tmp_path):
    """Files that the installation reads, without the network that later steps would need."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "install.sh", tmp_path / "tools")
    for file in ROOT.glob("constraints*.txt"):
        shutil.copy(file, tmp_path)
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    return tmp_path


def install(source, *arguments, script="install.sh", **environment):
    return subprocess.run(
        [f"tools/{script}", *arguments],
        cwd=source,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_install_refuses_an_old_python(source):
    old = script(source / "old-python", "#!/bin/sh\ncase $2 in *print*) echo 3.9.1 ;; *) exit 1 ;; esac\n")
    done = install(source, PYTHON=str(old))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "3.9.1" in done.stderr
    assert "3.11" in done.stderr
    assert not (source / ".venv").exists()


def test_install_refuses_an_environment_with_another_kernels(source):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=source, check=True, timeout=120)
    (site,) = (source / ".venv").glob("lib/python*/site-packages")
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("theirs = True\n")
    info = site / "kernels-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    done = install(source, PYTHON=str(script(source / "python", FAKE_PYTHON.format(no_cuda=1, version="3.11"))))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "'kernels'" in done.stderr
    assert (site / "kernels" / "__init__.py").read_text() == "theirs = True\n"
    assert not (source / ".venv" / ".installed").exists()


@pytest.mark.parametrize(("extra", "version"), [("", "3.11"), ("dev", "3.12")])
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_install_takes_torch_alone_or_leaves_the_machines(source, cuda, extra, version):
    python = script(source / "python", FAKE_PYTHON.format(no_cuda=0 if cuda else 1, version=version))
    done = install(source, *([extra] if extra else []), PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    calls = (source / "pip-calls").read_text().splitlines()
    torch = [call for call in calls if "torch==" in call]
    assert len(torch) == (0 if cuda else 1)
    assert not torch or (calls[0] == torch[0] and "-e" not in torch[0])
    assert calls[-1].endswith("-e .[dev]" if extra else "-e .")
    constraints = (source / "seen-constraints").read_text()
    assert ("torch==" in constraints) is not cuda
    assert ("megatron-core==0.16" in constraints) is (version == "3.11")
    assert ("--system-site-packages" in (source / "venv-calls").read_text()) is cuda
    assert [path.name for path in (source / ".venv").glob(".installed*")] == [
        ".installed-dev" if extra else ".installed"
    ]


@pytest.mark.parametrize(("required", "code"), [("", 0), ("slurm,loggers", 1)])
def test_packages_of_loggers_are_left_out_unless_required(tmp_path, required, code):
    (tmp_path / "tools").mkdir()
    for name in ("install_loggers.sh", "required.sh"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    done = install(tmp_path, script="install_loggers.sh", SELECTRON_REQUIRED=required)
    assert done.returncode == code
    assert done.stderr.splitlines()[0] == "install_loggers: there is no .venv; run make install first"
    script(tmp_path / ".venv" / "bin" / "python", "#!/bin/sh\necho pip: no network >&2; exit 1\n")
    done = install(tmp_path, script="install_loggers.sh", SELECTRON_REQUIRED=required)
    assert done.returncode == code
    assert done.stderr.splitlines()[:2] == ["pip: no network", "install_loggers: pip failed, see above"]
    assert not list((tmp_path / ".venv").glob("loggers/*"))


# Fake of the installation script: records its calls and creates the stamp of that step.
FAKE_INSTALL = """#!/bin/sh
echo "install $*" >>calls
mkdir -p .venv && touch ".venv/.installed${1:+-$1}"
"""


@pytest.fixture
def make(tmp_path):
    """Function that runs `make` with fakes of all commands and returns the calls in order."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "constraints-py312.txt"):
        (tmp_path / name).touch()
    script(tmp_path / "tools" / "install.sh", FAKE_INSTALL)
    script(tmp_path / "examples" / "quickstart.sh", "#!/bin/sh\necho demo >>calls\n")
    for name in ("ruff", "shellcheck", "mypy", "python"):
        script(tmp_path / ".venv" / "bin" / name, f"#!/bin/sh\necho {name} >>calls\n")

    def call(*arguments):
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        subprocess.run(["make", *arguments], cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True)
        return calls.read_text().splitlines()

    return call


FIRST, SECOND = "install ", "install dev"


def test_the_demo_does_not_wait_for_the_tools(make):
    assert make("demo") == [FIRST, "demo"]
    assert make("demo") == ["demo"]
    assert make("lint") == [SECOND, "ruff", "ruff", "shellcheck"]
    assert make("demo") == ["demo"]


@pytest.mark.parametrize("target", ["install", "test", "quick", "lint", "types", "format"])
def test_all_else_has_the_tools(make, target):
    assert make(target)[:2] == [FIRST, SECOND]
    assert not [call for call in make(target) if call.startswith("install")]
    assert make("demo") == ["demo"]


def test_what_is_older_than_the_versions_is_installed_again(make, tmp_path):
    make("install")
    for stamp in (tmp_path / ".venv").glob(".installed*"):
        os.utime(stamp, (0, 0))
    assert make("demo") == [FIRST, "demo"]
    assert make("lint")[0] == SECOND
