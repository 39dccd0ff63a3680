"""Options and environment variables of sbatch that would break a job are refused in every form, naming our option."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from megatron_ext.launch.sbatch_options import REJECTED, VARIABLES, check_options, check_variables
from megatron_ext.utils.errors import UserError


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--array=0-2", "sweep"),
        ("--array 0-2", "sweep"),
        ("--arr=0-2", "sweep"),
        ("-a0-2", "sweep"),
        ("-a 0-2", "sweep"),
        ("--account=x --array=0-2", "sweep"),
        ("--account=x -a 0-2", "sweep"),
        ("-Ha0-2", "sweep"),
        ("--chdir=/tmp", "another folder"),
        ("-D /tmp", "another folder"),
        ("--output=x", "omit it"),
        ("-ox", "omit it"),
        ("--out x", "omit it"),
        ("--error=x", "omit it"),
        ("-e x", "omit it"),
        ("--open-mode=truncate", "omit it"),
        ("--requeue", "--requeues"),
        ("--no-requeue", "--requeues"),
        ("--no-req", "--requeues"),
        ("--signal=B:USR1@60", "--save-before"),
        ("--nodes=2", "--nodes"),
        ("-N2", "--nodes"),
        ("--ntasks=2", "--processes-per-node"),
        ("-n 2", "--processes-per-node"),
        ("--ntasks-per-node=2", "--processes-per-node"),
        ("--cpus-per-task=2", "--cpus-per-task"),
        ("-c2", "--cpus-per-task"),
        ("--gpus=2", "--gpus-per-node"),
        ("--gres=gpu:2", "--gpus-per-node"),
        ("--gres gpu:h100:2", "--gpus-per-node"),
        ("-G2", "--gpus-per-node"),
        ("--wrap=hostname", "omit it"),
        ("--export=NONE", "calling shell"),
        ("--export-file=x", "calling shell"),
        ("--time=1:00", "--time"),
        ("-t 60", "--time"),
        ("--partition=x", "--partition"),
        ("-px", "--partition"),
        ("--job-name=x", "--job-name"),
        ("--test-only", "--dry-run"),
        ("--wait", "--follow"),
        ("-W", "--follow"),
        ("--no-kill", "omit it"),
        ("-k", "omit it"),
        ("-M other", "other cluster"),
        ("--container=x", "--container"),
    ],
)
def test_options_that_break_a_job_are_rejected(option: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        check_options([option])
    assert error.value.where == "--sbatch"
    assert option in error.value.problem
    assert hint in error.value.hint


@pytest.mark.parametrize(
    "option",
    [
        *("--account=mine", "-A mine", "-Amine", "-A nao", "--qos=high", "-q high", "--mem=0", "--mem-per-cpu=8G"),
        *("--exclude=n1", "-x n1,na", "--nodelist=n1", "-w n1", "--constraint=a100", "-C a100", "--exclusive"),
        *("--gres=lscratch:100", "--mail-type=END", "--mail-user=a@b", "--comment='a note'", "--time-min=60"),
        *("--dependency=afterok:7", "-d afterok:7", "--begin=now+1hour", "-b now", "--reservation=r", "--licenses=a"),
        *("--hold", "-H", "--nice", "--wait-all-nodes=1", "--switches=1", "--tmp=10G", "--umask=0077", "-s"),
    ],
)
def test_other_options_are_passed_on(option: str) -> None:
    check_options([option])


@pytest.mark.parametrize("option", ["account=x", "", "-", "--", "--account='x", "--account=x\n#SBATCH --array=0"])
def test_invalid_option(option: str) -> None:
    with pytest.raises(UserError, match="is not an sbatch option; give one like --sbatch=--account=mine"):
        check_options([option])


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_that_break_a_job_are_refused(variable: str) -> None:
    with pytest.raises(
        UserError, match=f"{variable}: is set, which sbatch treats as --{VARIABLES[variable]}, but .*unset"
    ):
        check_variables({"HOME": "/", variable: "1"}, [])


def test_variable_is_rejected_with_the_option_that_it_overrides() -> None:
    environment = {"SBATCH_PARTITION": "debug", "SBATCH_ACCOUNT": "mine"}
    check_variables(environment, ["--time"])
    with pytest.raises(UserError, match="SBATCH_PARTITION: is set to 'debug', which overrides --part"):
        check_variables(environment, ["--partition"])


@pytest.mark.skipif(shutil.which("man") is None, reason="there are no manual pages")
def test_rejected_options_exist_in_sbatch() -> None:
    manual = subprocess.run(
        ["man", "sbatch"], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    if manual.returncode or "--" not in manual.stdout:  # a minimized system has a `man` that only says so
        pytest.skip("there is no manual page of sbatch")
    there = set(re.findall(r"--([a-z][a-z-]+)", manual.stdout))
    assert set(REJECTED) <= there
    assert set(VARIABLES) <= set(re.findall(r"\bS(?:BATCH|LURM)_[A-Z_]+", manual.stdout))
