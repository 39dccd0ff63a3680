from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pydantic.dataclasses import dataclass as checked

from megatron_ext import cli
from megatron_ext.commands import run_config
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import STRICT
from megatron_ext.config.traits import MixerTraits
from megatron_ext.utils.errors import UserError

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@checked(frozen=True, kw_only=True, config=STRICT)
class FakeConfig:
    chunk_size: int = 1
    score: str = "exact"


TRAITS = MixerTraits(supports_kv_gather=True, supports_document_masking=True)
MIXERS = {name: types.SimpleNamespace(config_type=FakeConfig, traits=TRAITS) for name in ("attention", "top1_chunk")}


@dataclass
class Training:
    """Fake of megatron_ext.training.run."""

    calls: list[tuple[Any, bool, int | None]] = field(default_factory=list)
    trials_of: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def train(self, config: Any, resume: bool, from_step: int | None, trial_of: Any) -> bool:
        self.environment = dict(os.environ)
        self.trials_of.append(trial_of)
        self.calls.append((config, resume, from_step))
        if self.error:
            raise self.error
        return True


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    """Set up fake mixers and fake training, outside any launcher."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")  # makes pytest remove what the command sets
        monkeypatch.delenv(name)
    fake = Training()
    module = types.ModuleType("megatron_ext.training.run")
    module.train = fake.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_ext.training.run", module)
    monkeypatch.setattr(run_config, "mixers", lambda: MIXERS)
    return fake


def run(*arguments: str) -> int:
    try:
        return cli.main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def test_one_process_trains_in_this_one(training: Training) -> None:
    before = dict(os.environ)
    assert run("train", QUICKSTART, "parallel.tensor=1", "--resume") == 0
    ((config, resume, from_step),) = training.calls
    assert (config.parallel.tensor, resume, from_step) == (1, True, None)
    assert (training.environment["RANK"], training.environment["WORLD_SIZE"]) == ("0", "1")
    assert int(training.environment["MASTER_PORT"]) > 0
    assert dict(os.environ) == before  # later commands in this process must not be ranks of that store


@pytest.mark.parametrize(
    ("how", "resume"),
    [
        ([], False),
        (["--resume"], True),
        (["--resume", "training.steps=9"], True),  # the override is not the value of the option
        (["--resume=auto"], "auto"),
        (["training.steps=9", "--resume=auto", "training.seed=3"], "auto"),
    ],
)
def test_resuming_is_asked_for_or_left_to_what_is_there(training: Training, how: list[str], resume: object) -> None:
    assert run("train", QUICKSTART, "parallel.tensor=1", *how) == 0
    ((config, asked, _),) = training.calls
    assert asked == resume
    assert config.training.steps == (9 if "training.steps=9" in how else config.training.steps)


def test_resuming_takes_no_other_word(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", QUICKSTART, "--resume=always") == 2
    assert "--resume" in capsys.readouterr().err
    assert not training.calls


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [(["--trial"], 5), (["--trial", "7"], 7), (["--trial=7"], 7), (["--trial", "optimizer.lr=1e-3"], 5)],
)
def test_a_trial_is_some_steps_of_the_run(training: Training, arguments: list[str], steps: int) -> None:
    assert run("train", QUICKSTART, "parallel.tensor=1", *arguments) == 0
    ((trial, resume, from_step),), (whole,) = training.calls, training.trials_of
    assert (trial.training.steps, resume, from_step) == (steps, False, None)
    assert (trial.run.dir, whole.run.dir, whole.training.steps) == ("runs/quickstart/trials", "runs/quickstart", 80)
    assert trial.optimizer.lr == whole.optimizer.lr == (1e-3 if "optimizer.lr=1e-3" in arguments else 2e-3)


def test_several_processes_are_launched_after_the_check(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[list[str], int]] = []

    def launch(command: list[str], processes: int) -> int:
        launched.append((command, processes))
        return 0

    monkeypatch.setattr("megatron_ext.launch.local.launch", launch)
    assert run("train", QUICKSTART, "--processes", "2", "training.steps=30", "--from-step", "20") == 0
    ((command, processes),) = launched
    assert processes == 2
    assert command[3:] == ["train", QUICKSTART, "--processes", "2", "training.steps=30", "--from-step", "20"]
    assert run("train", QUICKSTART, "--processes", "3") == 2
    assert len(launched) == 1
    assert not training.calls


def test_a_rank_trains(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("train", QUICKSTART, "--processes", "2", "--from-step", "20") == 0
    assert training.calls[0][1:] == (False, 20)


def test_print_config_starts_nothing_and_can_be_read_back(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", QUICKSTART, "--print-config", "training.steps=30") == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path, [], MIXERS) == load_config(Path(QUICKSTART), ["training.steps=30"], MIXERS)
    assert not training.calls


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["train", QUICKSTART],
            "parallel: tensor 2 * pipeline 1 * context 1 = 2 processes per replica, which does not divide the "
            "world size 1; "
            "start a multiple of 2 (--processes 2), or lower one of the sizes",
        ),
        (["train", QUICKSTART, "--processes", "0"], "--processes: 0 is less than 1; give 1 or more"),
        (["train", "none.yaml"], "none.yaml: no such file; give the path of a configuration, see examples/"),
        (["train", QUICKSTART, "steps=3"], "steps: no such field; did you mean training.steps?"),
        (["train", QUICKSTART, "--proc", "2"], "unrecognized arguments: --proc 2; did you mean --processes?"),
        (["train", QUICKSTART, "--resum"], "unrecognized arguments: --resum; did you mean --resume?"),
        (["train", QUICKSTART, "--form-step", "3"], "unrecognized arguments: --form-step 3; did you mean --from-step?"),
        (["train", "examples"], "examples: is a folder; give the path of a configuration, see examples/"),
        (["bench", "layer"], "argument SUBJECT: invalid choice: 'layer' (choose from"),
        (["trian"], "trian: no such command; did you mean train? (selectron --help)"),
        (["xyz"], "xyz: no such command; known: train, launch, sweep"),
        ([], "a command is missing (train, launch, sweep"),
        (["report"], "the following arguments are required:"),
        (["train"], "the following arguments are required: CONFIG; see `selectron train --help`"),
    ],
)
def test_a_users_mistake_is_one_line(
    training: Training, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run(*arguments) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"selectron: error: {line}")


def test_a_choice_that_is_nearly_right_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "layer") == 2
    assert capsys.readouterr().err.endswith("; did you mean layers?; see `selectron bench --help`\n")


def test_the_folder_of_a_run_is_no_configuration(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    assert run("train", str(tmp_path)) == 2
    said = f"{tmp_path}: is the folder of a run; give its {tmp_path}/config.yaml"
    assert capsys.readouterr().err == f"selectron: error: {said}\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith(f"selectron {metadata.version('selectron')}")


def test_errors_of_training(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", QUICKSTART, "parallel.tensor=1"]
    training.error = UserError("data.path", "is empty", "prepare it")
    assert run(*arguments) == 2
    assert capsys.readouterr().err == "selectron: error: data.path: is empty; prepare it\n"
    training.error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        run(*arguments)
    training.error = KeyboardInterrupt()
    assert run(*arguments) == 130
    assert capsys.readouterr().err == ""


def test_processes_must_agree_with_the_launcher(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run("train", QUICKSTART, "--processes", "2") == 2
    assert "--processes: 2 differs from the 1 that the launcher has started" in capsys.readouterr().err


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_help_is_there_at_once() -> None:
    imports = "import sys, megatron_ext.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    heavy = "assert not {'torch', 'megatron', 'pydantic', 'data_prep'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", imports + heavy], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_configuration_imports_nothing_heavy() -> None:
    imports = "import sys, megatron_ext.config.load, megatron_ext.config.rules, megatron_ext.config.save\n"
    heavy = "assert not {'torch', 'megatron', 'megatron_ext.mixers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", imports + heavy], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_exit_codes_of_the_command_itself() -> None:
    help_text, mistake = command("--help"), command("train", "--processes", "x", "c.yaml")
    assert (help_text.returncode, help_text.stderr) == (0, "")
    assert mistake.returncode == 2
    assert mistake.stderr.count("\n") == 1
    assert "Traceback" not in mistake.stderr


def test_a_reader_that_has_gone_is_no_error_of_ours() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megatron_ext.cli", "--version"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.EXIT_NO_READER, "")


def test_garbage_is_not_looked_for_in_what_a_command_has_imported(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: collecting.append(gc.isenabled()))
    arguments = ["train", QUICKSTART, "parallel.tensor=1"]
    assert cli.main(arguments) == 0
    assert collecting == []  # otherwise this process would keep the setting
    monkeypatch.setattr(sys, "argv", ["selectron", *arguments])
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert cli.main() == 0
    assert collecting == [False]
    assert gc.isenabled()


def test_another_broken_pipe_is_an_error(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr(cli, "_dispatch", broken)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        cli.main([])


def test_real_mixers_and_the_examples() -> None:
    """Registered mixers satisfy the configuration's protocol, and the examples name existing fields.

    In the same process a mistake is reported in one line, whatever the imports print.
    """
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from megatron_ext.cli import main\n"
        f"code = main(['train', {QUICKSTART!r}, '--processes', '2', 'mixers.top1_chunk.score=best'])\n"
        "from megatron_ext.mixers.core.registry import load_all\n"
        "from megatron_ext.config.load import load_config\n"
        "from megatron_ext.config.rules import check\n"
        "mixers = load_all()\n"
        "for name, world in (('quickstart', 2), ('110m_2k', 8), ('1p3b_100k', 8)):\n"
        "    check(load_config(Path(f'examples/{name}.yaml'), [], mixers), world, mixers)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith('selectron: error: mixers.top1_chunk.score: "best" is not one of the choices; choose ')
