"""Errors of `selectron launch` and `selectron sweep` as a user sees them: one line, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import write_config

from megatron_ext.checkpoint.folder import CheckpointFolder, Progress, Retention
from megatron_ext.cli import main

BOTH = pytest.mark.parametrize("verb", ["launch", "sweep"])
SINFO = "echo 'gpu*|4|gpu:8|96|1-00:00:00'"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a configuration, a sweep and data, on a machine without Slurm."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "data").mkdir()
    write_config(tmp_path, tmp_path / "data", tmp_path / "runs")
    (tmp_path / "sizes.yaml").write_text("config: config.yaml\naxes: {training.seed: [1]}\n")
    return tmp_path


def install(folder: Path, program: str, body: str) -> None:
    path = folder / "bin" / program
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def call_command(folder: Path, verb: str, *arguments: str) -> int:
    return main([verb, str(folder / ("config.yaml" if verb == "launch" else "sizes.yaml")), *arguments])


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], verb: str, *arguments: str) -> str:
    """Return the one error line of a refused command, which must write nothing."""
    before = sorted(folder.rglob("*"))
    assert call_command(folder, verb, *arguments) == 2
    assert sorted(folder.rglob("*")) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.removeprefix("selectron: error: ")


MOUNTS_MEND = "give existing paths, PATH or PATH:PATH_IN_CONTAINER, separated by commas"


@BOTH
@pytest.mark.parametrize("where", [[], ["--local", "1"]])
@pytest.mark.parametrize(
    ("arguments", "of_run", "line"),
    [
        (["data.path=/nowhere"], True, "data.path: there is no folder /nowhere; prepare it with `selectron prepare`"),
        (
            ["run.branch_from=/nowhere/checkpoints/step_4"],
            True,
            "run.branch_from: there is no checkpoint /nowhere/checkpoints/step_4; "
            "give a path like runs/trunk/checkpoints/step_400",
        ),
        (["run.branch_from=/tmp"], True, "run.branch_from: there is no checkpoint /tmp; give a path like "),
        (["run.branch_from=/"], True, "run.branch_from: there is no checkpoint /; give a path like "),
        (
            ["--python", "/nowhere/python"],
            False,
            "--python: there is no program /nowhere/python; give an interpreter with Selectron installed",
        ),
        (["--python", "pyhton3"], False, "--python: there is no program pyhton3; "),
        (
            ["--container-mounts", "/tmp,/nowhere:/in"],
            False,
            f"--container-mounts: there is no /nowhere; {MOUNTS_MEND}",
        ),
        (["--container-mounts", "/tmp,"], False, f"--container-mounts: there is no path before a comma; {MOUNTS_MEND}"),
    ],
)
def test_missing_paths(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    where: list[str],
    arguments: list[str],
    of_run: bool,
    line: str,
) -> None:
    named = f"{folder}/sizes.yaml: run seed1: " if of_run and verb == "sweep" else ""
    message = refusal(folder, capsys, verb, *arguments, *where)
    assert message.startswith(named + line)
    assert message.count("\n") == 1


@BOTH
def test_data_path_inside_a_container_mount(folder: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    inside = ["--container", "registry/image:1", "--container-mounts", f"{folder}:/in"]
    named = f"{folder}/sizes.yaml: run seed1: " if verb == "sweep" else ""
    assert refusal(folder, capsys, verb, *inside, "data.path=/in/none") == (
        f"{named}data.path: there is no folder /in/none ({folder}/none on this machine); "
        "prepare it with `selectron prepare`\n"
    )
    for path, warning in (
        ("/in/data", ""),
        ("/image", "data.path: /image is not under a mount of the container and was not checked"),
    ):
        assert call_command(folder, verb, *inside, f"data.path={path}", "--dry-run") == 0
        warnings = [line for line in capsys.readouterr().err.splitlines() if "data.path" in line]
        assert warnings == ([f"selectron: warning: {warning}"] if warning else [])


@BOTH
def test_copy_engines_between_nodes(folder: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    named = f"{folder}/sizes.yaml: " if verb == "sweep" else ""
    copies = ["run.device=cuda", "parallel.context=4", "parallel.context_transport=copy_engine"]
    assert refusal(folder, capsys, verb, "--nodes", "2", "--gpus-per-node", "2", *copies) == (
        f"{named}parallel.context_transport: copy_engine, and tensor 1 * context 4 = 4 processes do not divide nodes "
        "of 2; choose nccl, or a tensor * context that divides 2\n"
    )


def test_a_dry_run_of_a_sweep_lists_runs_whose_data_is_elsewhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "data.path: there is no folder /nowhere; prepare it with `selectron prepare`"
    assert refusal(folder, capsys, "launch", "--dry-run", "data.path=/nowhere") == f"{line}\n"
    assert call_command(folder, "sweep", "--dry-run", "--local", "1", "data.path=/nowhere") == 0
    captured = capsys.readouterr()
    assert captured.err == f"selectron: warning: {folder}/sizes.yaml: run seed1: {line}\n"
    assert "| seed1 | 10 | 2,560 |" in captured.out


def test_started_run_does_not_need_its_trunk(folder: Path) -> None:
    (folder / "runs" / "run" / "checkpoints").mkdir(parents=True)
    assert call_command(folder, "launch", "run.branch_from=/nowhere", "--resume", "--dry-run") == 0


def test_resumed_run_is_checked_before_submission(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume needs a checkpoint and compatible fields. With `--resume=auto` a run may start from scratch."""
    for module in ("sinfo", "sbatch"):
        install(folder, module, "exit 1")
    line = refusal(folder, capsys, "launch", "--dry-run", "--resume")
    assert line.startswith(f"--resume: {folder}/runs/run contains no checkpoint to resume from; --resume=auto starts")
    save_checkpoint(folder / "runs" / "run", hidden_size=64)
    line = refusal(folder, capsys, "launch", "--dry-run", "--resume")
    assert line.startswith(f"model.hidden_size: 32, but the checkpoint {folder}/runs/run/checkpoints/step_2 has 64")
    assert call_command(folder, "launch", "--dry-run", "--resume", "model.hidden_size=64") == 0
    assert call_command(folder, "launch", "--dry-run", "--resume=auto", "run.name=new") == 0


def save_checkpoint(run: Path, **model: int) -> None:
    """Write a checkpoint whose record has other model fields than the configuration."""
    folder = CheckpointFolder(run / "checkpoints")
    folder.create_partial(2)
    identity = {f"model.{field}": value for field, value in model.items()}
    folder.complete(2, {"progress": Progress(2), "identity": identity, "generators": []}, {}, Retention())


def test_a_branch_of_the_sweep_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint need not exist yet, but its name must be valid."""
    trunk = folder / "runs" / "sizes" / "seed1" / "checkpoints"
    short = f"short: {{run.branch_from: {trunk}/STEP}}"
    sweep = (
        f"config: config.yaml\nfields: {{training.keep_every: 3}}\naxes: {{training.seed: [1]}}\nruns: {{{short}}}\n"
    )
    (folder / "sizes.yaml").write_text(sweep.replace("STEP", "step_6"))
    assert call_command(folder, "sweep", "--dry-run") == 0
    capsys.readouterr()
    (folder / "sizes.yaml").write_text(sweep.replace("STEP", "latest"))
    line = (
        f"run short: run.branch_from: {trunk}/latest is not a checkpoint of a run; give a path like {trunk}/step_400\n"
    )
    assert refusal(folder, capsys, "sweep", "--dry-run") == f"{folder}/sizes.yaml: {line}"


@BOTH
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--partition", "cpu"], "--partition: there is no partition cpu; choose from gpu"),
        (["--nodes", "5"], "--nodes: 5 is too many: partition gpu has 4 nodes; give 4 or fewer"),
        (
            ["--gpus-per-node", "9"],
            "--gpus-per-node: 9 is too many: partition gpu has 8 GPUs per node; give 8 or fewer",
        ),
        (
            ["--processes-per-node", "4", "--cpus-per-task", "25"],
            "--cpus-per-task: 25 for each of 4 processes is too many: partition gpu has 96 CPUs per node; "
            "give 24 or fewer",
        ),
        (
            ["--time", "2-00"],
            "--time: 2-00 is too long: partition gpu has a limit of 1-00:00:00; give 1-00:00:00 or less",
        ),
        (
            ["--job-name", "my run"],
            "--job-name: 'my run' is not a valid file name; use letters, digits, '.', '_' and '-'",
        ),
    ],
)
def test_resources_that_the_cluster_lacks(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: str, dry: list[str], arguments: list[str], line: str
) -> None:
    install(folder, "sinfo", SINFO)
    install(folder, "sbatch", "exit 1")
    batch = "training.global_batch_size=360"  # divisible among as many processes
    assert refusal(folder, capsys, verb, *arguments, *dry, batch) == f"{line}\n"


@BOTH
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_constraints_that_only_sbatch_checks(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: str, dry: list[str]
) -> None:
    """Requests that only sbatch can refuse, such as when too few nodes of a partition have the resources."""
    install(folder, "sinfo", SINFO)
    install(folder, "sbatch", "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1")
    message = "allocation failure: Requested node configuration is not available; correct this and try again"
    assert refusal(folder, capsys, verb, *dry) == f"sbatch: refused: {message}\n"


def test_sweep_with_unsupported_file_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sizes.yaml").rename(folder / "my sizes.yaml")
    assert main(["sweep", str(folder / "my sizes.yaml")]) == 2
    assert capsys.readouterr().err.startswith("selectron: error: --job-name: 'my sizes' is not a valid file name")
    assert not (folder / "runs").exists()


@BOTH
def test_dry_run_reports_that_no_cluster_was_checked(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert call_command(folder, verb, "--dry-run") == 0
    unchecked = "selectron: warning: the request was not checked by a cluster:"
    warning = f"{unchecked} selectron launch: there is no sbatch on this machine"
    assert warning in capsys.readouterr().err.splitlines()
    install(folder, "sbatch", "exit 1")
    install(folder, "sinfo", "echo 'sinfo: error: no controller' >&2; exit 1")
    assert call_command(folder, verb, "--dry-run") == 0
    warning = "selectron: warning: the request was not checked by a cluster: sinfo: refused: error: no controller"
    assert warning in capsys.readouterr().err.splitlines()
    assert call_command(folder, verb, "--dry-run", "--local", "1") == 0
    assert "cluster" not in capsys.readouterr().err


def test_processors_are_set_by_slurm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--local: 1 cannot be combined with --cpus-per-task, which applies to Slurm; omit one of them\n"
    assert refusal(folder, capsys, "launch", "--local", "1", "--cpus-per-task", "2") == line
