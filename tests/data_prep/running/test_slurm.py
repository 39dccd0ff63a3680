"""Slurm jobs as a fake `sbatch` records them, and their tasks run locally."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dill
import pytest
from prep_fakes import options

from data_prep.manifest import load_manifest
from data_prep.prepare import prepare
from data_prep.running import execution
from data_prep.running.execution import Execution
from data_prep.running.slurm import _Job
from megatron_ext.utils.errors import UserError

SBATCH = f"""#!{sys.executable}
import json, pathlib, sys
log = pathlib.Path(__file__).with_name("jobs")
log.mkdir(exist_ok=True)
number = 100 + len(list(log.iterdir()))
script = pathlib.Path(sys.argv[-1]).read_text()
(log / str(number)).write_text(json.dumps([sys.argv[1:-1], script]))
print("Submitted batch job", number)
"""

SCONTROL = "#!/bin/sh\necho node1\n"
ON_SLURM = Execution(executor="slurm", workers=2, slurm_partition="cpu", slurm_time="1:00:00")


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, content in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "jobs"


def run_job(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = re.search(r"launch_pickled_pipeline (\S+)", script)[1]
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", script).groups())
    monkeypatch.setenv("SLURM_NODELIST", "node1")
    for task in range(first, last + 1):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        with open(path, "rb") as file:
            dill.load(file).run()
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")


def test_chain_of_jobs_gives_the_local_result(records, tmp_path, tokenizer_file, slurm, monkeypatch):
    assert prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, execution=ON_SLURM)) is None
    jobs = [json.loads(path.read_text()) for path in sorted(slurm.iterdir())]
    assert [re.search(r"--job-name=prepare-(\S+)", script)[1] for _, script in jobs] == [
        *("exact_signatures", "exact_pairs", "exact_survivors"),
        *("merge_test_ngrams", "search_train", "merge_findings", "judge_test", "report"),
        *("tokenising", "merging"),
    ]
    waits = [next((given for given in arguments if "dependency" in given), None) for arguments, _ in jobs]
    assert waits == [None, *(f"--dependency=afterok:{number}" for number in range(100, 109))]
    for _, script in jobs:
        assert {"#SBATCH --partition=cpu", "#SBATCH --time=1:00:00", "#SBATCH --mem-per-cpu=2G"} <= set(
            script.splitlines()
        )
    assert not (tmp_path / "out").exists()
    for _, script in jobs:
        run_job(script, monkeypatch)
    prepare(options(records, tmp_path / "local", tokenizer_file, tasks=2))
    files = {path.relative_to(tmp_path / "local") for path in (tmp_path / "local").rglob("*")}
    assert files == {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    assert load_manifest(tmp_path / "out") == load_manifest(tmp_path / "local")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_no_second_run_while_jobs_are_active(records, tmp_path, tokenizer_file, slurm, executor):
    def call(chosen: Execution) -> None:
        prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, execution=chosen))

    def answer(script: str) -> None:
        (slurm.parent / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (slurm.parent / "squeue").chmod(0o755)

    call(ON_SLURM)
    numbers = sorted(path.name for path in slurm.iterdir())
    again = Execution(executor=executor, workers=2 if executor == "slurm" else 1, slurm_partition="cpu")
    answer("echo 55 55; echo 999 103")
    where = "at stage 1/4 exact_signatures: 0 % of .*B read, no running task"
    with pytest.raises(
        UserError, match=rf"out\.partial: is being written by Slurm jobs 103, {where}; .*: scancel 103$"
    ):
        call(again)
    answer("exit 1")
    with pytest.raises(UserError, match=rf"may still be written by Slurm jobs {','.join(numbers)}, and squeue failed"):
        call(again)
    answer("echo 55 55")
    call(again)
    assert (tmp_path / "out").exists() == (executor == "local")
    assert len(list(slurm.iterdir())) == len(numbers) * (2 if executor == "slurm" else 1)


def test_refused_run_reports_the_progress_of_the_jobs(records, tmp_path, tokenizer_file, slurm, monkeypatch):
    """Repeat the call after each job, and once while a task that has finished reading is still running."""

    def refusal() -> str:
        with pytest.raises(UserError) as caught:
            prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, execution=ON_SLURM))
        return caught.value.problem.removeprefix("is being written by Slurm jobs 109, at ")

    prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, execution=ON_SLURM))
    (slurm.parent / "squeue").write_text("#!/bin/sh\necho 109 109\n")
    (slurm.parent / "squeue").chmod(0o755)
    scripts = [json.loads(path.read_text())[1] for path in sorted(slurm.iterdir())]
    found = []
    for script in scripts[:-1]:
        run_job(script, monkeypatch)
        found.append(refusal())
    assert [re.sub(r" of .*B read", "", where) for where in found] == [
        *("exact_pairs, before 2/4 search_train", "exact_survivors, before 2/4 search_train"),
        *("merge_test_ngrams, before 2/4 search_train", "stage 2/4 search_train: 0 %, no running task"),
        *("merge_findings, before 3/4 judge_test", "stage 3/4 judge_test: 0 %, no running task"),
        *("report, before 4/4 tokenising", "stage 4/4 tokenising: 0 %, no running task"),
        "merging, after all stages",
    ]
    (tmp_path / "out.partial" / ".work" / "tasks-tokenising" / "completions" / "00001").unlink()
    size = sum(path.stat().st_size for path in records.iterdir())
    assert re.fullmatch(
        rf"stage 4/4 tokenising: 100 % of {size / 1000:.2f}kB read, .*B/s, .* tokens/s, 00:00 left in this stage",
        refusal(),
    )


def test_earlier_jobs_are_cancelled_if_one_is_refused(records, tmp_path, tokenizer_file, slurm):
    (slurm.parent / "scancel").write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/taken_back"\n')
    (slurm.parent / "scancel").chmod(0o755)
    refusing = SBATCH.replace("print(", 'number < 102 or sys.exit("no more jobs")\nprint(')
    (slurm.parent / "sbatch").write_text(refusing)
    with pytest.raises(UserError, match=r"^--executor: sbatch failed with exit code 1; "):
        prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, execution=ON_SLURM))
    assert (slurm.parent / "taken_back").read_text().split() == ["100", "101"]


def test_more_tasks_than_array_jobs(records, tmp_path, tokenizer_file, slurm, monkeypatch):
    monkeypatch.setattr("data_prep.running.slurm.MAX_ARRAY", 2)
    prepare(options(records, tmp_path / "out", tokenizer_file, tasks=3, execution=ON_SLURM))
    jobs = [json.loads(path.read_text()) for path in sorted(slurm.iterdir())]
    assert "#SBATCH --array=0-1%2" in jobs[0][1]
    for _, script in jobs:
        run_job(script, monkeypatch)
    prepare(options(records, tmp_path / "local", tokenizer_file, tasks=3))
    assert load_manifest(tmp_path / "out") == load_manifest(tmp_path / "local")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (Execution(executor="ray"), "--executor: ray is not installed; "),
        (Execution(executor="slurm", slurm_partition="cpu"), "--executor: sbatch was not found for slurm; "),
    ],
)
def test_missing_executor(records, tmp_path, tokenizer_file, monkeypatch, chosen, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(execution.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError) as caught:
        prepare(options(records, tmp_path / "out", tokenizer_file, execution=chosen))
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "out.partial").exists()


def test_slurm_needs_a_partition_and_may_refuse(records, tmp_path, tokenizer_file, slurm):
    with pytest.raises(UserError, match=r"^--slurm-partition: is not given; "):
        prepare(options(records, tmp_path / "out", tokenizer_file, execution=Execution(executor="slurm")))
    (slurm.parent / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UserError, match=r"^--executor: sbatch failed with exit code 3; "):
        prepare(options(records, tmp_path / "out", tokenizer_file, execution=ON_SLURM))


def test_names_with_shell_characters(tmp_path, monkeypatch):
    """The script runs with a hostile path. datatrove's program must receive the pipeline file's name unchanged."""
    name = '-x it\'s "y" $(touch canary) `touch canary` ;touch canary; >canary #c 50%j ~ \u00e9 $HOME *'
    programs, work = tmp_path / name / "bin", tmp_path / "work"
    programs.mkdir(parents=True)
    work.mkdir()
    (programs / "launch_pickled_pipeline").write_text(f'#!/bin/sh\nprintf "%s|" "$@" >{work}/called\n')
    (programs / "launch_pickled_pipeline").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.chdir(work)
    execution = replace(ON_SLURM, slurm_partition=name)
    job = _Job([], 1, "stage", str(tmp_path / name / "notes"), tmp_path, f"{tmp_path}/{name}.slurm", execution, None)
    script = job.get_launch_file_contents(job.get_sbatch_args(1), "")
    (work / "script").write_text(script)
    subprocess.run(["bash", "script"], cwd=work, check=True, capture_output=True, timeout=30)
    assert (work / "called").read_text() == f"{tmp_path}/{name}/notes/executor.pik|"
    assert not list(tmp_path.rglob("canary"))
    options = [shlex.split(line) for line in script.splitlines() if line.startswith("#SBATCH ")]
    log = f"{tmp_path}/{name.replace('%', '%%')}.slurm/stage/%A_%a.out"
    assert {f"--partition={name}", f"--output={log}", f"--error={log}"} <= {option for _, option in options}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"output": "a\n#SBATCH --wrap=x"}, "--output"),
        ({"output": "a::b"}, "--output"),
        ({"output": "memory://b"}, "--output"),
        ({"output": "a\\b"}, "--output"),
        ({"input": "a\x1b[2J"}, "--input"),
        ({"execution": replace(ON_SLURM, slurm_time="1\nid")}, "--slurm-time"),
        ({"execution": replace(ON_SLURM, slurm_partition="a\rb")}, "--slurm-partition"),
    ],
)
def test_names_that_are_refused(records, tmp_path, tokenizer_file, slurm, monkeypatch, change, where):
    monkeypatch.chdir(tmp_path)
    fields = {"execution": ON_SLURM, **change}
    with pytest.raises(UserError, match=f"^{where}: ") as caught:
        prepare(replace(options(records, "out", tokenizer_file), **fields))
    assert str(caught.value).isprintable()
    assert not slurm.exists()
    assert not list(tmp_path.glob("*.partial"))
