"""Checks of user-supplied sbatch options: those that a job sets itself or that would break it are rejected with advice.

User options come from `--sbatch` and from `SBATCH_*` variables, which take precedence over the script's directives.
Only options known to break a job are listed. All others are passed to sbatch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from megatron_ext.utils.errors import UserError

_LOG = "the job's log is RUN/launch/N/job-NUMBER.log, which `selectron logs` shows", "omit it"
_REQUEUE = "the job requeues itself", "use --requeues (0: never)"
_NODES = "the number of processes depends on it", "use --nodes"
_TASKS = "the job starts a process per GPU, or --processes-per-node", "use --gpus-per-node or --processes-per-node"
_GPUS = "the job starts a process per GPU", "use --gpus-per-node"
_ENVIRONMENT = "the job's processes need the environment that the script sets", "set the variables in the calling shell"
_NO_JOB = "sbatch would not submit a job", "use `selectron launch --dry-run`"

REJECTED: Mapping[str, tuple[str, str]] = {
    "array": ("all tasks would train the same run", "use `selectron sweep`"),
    "chdir": ("relative paths refer to the folder of the submission", "launch from another folder"),
    "clusters": ("status, cancel and requeues use only this cluster", "launch on a login node of the other cluster"),
    "container": ("it expects another kind of image", "use --container"),
    "cpus-per-gpu": ("CPUs are requested per process", "use --cpus-per-task"),
    "cpus-per-task": ("the number of threads depends on it", "use --cpus-per-task without --sbatch"),
    "error": _LOG,
    "export": _ENVIRONMENT,
    "export-file": _ENVIRONMENT,
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": _GPUS,
    "help": _NO_JOB,
    "input": ("the job's script reads no input", "omit it"),
    "job-name": ("file names contain it", "use --job-name"),
    "no-kill": ("the run would wait for the lost node", "omit it"),
    "no-requeue": _REQUEUE,
    "nodes": _NODES,
    "ntasks": _TASKS,
    "ntasks-per-core": _TASKS,
    "ntasks-per-gpu": _TASKS,
    "ntasks-per-node": _TASKS,
    "ntasks-per-socket": _TASKS,
    "open-mode": _LOG,
    "output": _LOG,
    "partition": ("its nodes and limits are checked first", "use --partition"),
    "requeue": _REQUEUE,
    "signal": ("the job saves its checkpoint at this signal", "use --save-before"),
    "test-only": _NO_JOB,
    "time": ("checkpoints are saved before this limit", "use --time"),
    "usage": _NO_JOB,
    "version": _NO_JOB,
    "wait": ("the call would block until the job ends", "use `selectron logs RUN --follow`"),
    "wrap": ("the job has a script already", "omit it"),
}

_SHORT = {
    "a": "array",
    "c": "cpus-per-task",
    "D": "chdir",
    "e": "error",
    "G": "gpus",
    "h": "help",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "M": "clusters",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "t": "time",
    "V": "version",
    "W": "wait",
}
_SHORT_WITHOUT_VALUE = "HhkOQsvVW"

VARIABLES: Mapping[str, str] = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONTAINER": "container",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_ERROR": "error",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_INPUT": "input",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_NO_KILL": "no-kill",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_OUTPUT": "output",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_WAIT": "wait",
    "SLURM_CLUSTERS": "clusters",
}
"""Variables that correspond to rejected options. They are always rejected."""

OVERRIDING: Mapping[str, str] = {
    "SBATCH_CPUS_PER_TASK": "--cpus-per-task",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_TIMELIMIT": "--time",
}
"""Variables with defaults of a site or user; rejected only together with the `selectron` option they override."""


def check_options(options: Iterable[str]) -> None:
    """Reject `--sbatch` options that would break a job.

    Args:
        options: one argument each, which may contain several sbatch options separated by spaces.

    Raises:
        UserError: an option would break the job, or is not an option.
    """
    for option in options:
        try:
            words = shlex.split(option)
        except ValueError:
            words = []
        if not words or not words[0].startswith("-") or words[0].strip("-") == "" or "\n" in option:
            raise UserError("--sbatch", f"{option!r} is not an sbatch option", "give one like --sbatch=--account=mine")
        for name in (name for word in words if word.startswith("-") for name in _names(word)):
            if name in REJECTED:
                reason, hint = REJECTED[name]
                raise UserError("--sbatch", f"{option} sets {name}, but {reason}", hint)
        if any(word.startswith("--gres=") and "gpu" in word for word in words) or "gpu" in _value(words, "--gres"):
            raise UserError("--sbatch", f"{option} sets GPUs, but {_GPUS[0]}", _GPUS[1])


def check_variables(environment: Mapping[str, str], given_options: Iterable[str]) -> None:
    """Reject variables that sbatch would interpret as options that break a job.

    Args:
        environment: environment variables of the call.
        given_options: `selectron` options that the user gave, e.g. `--time`.

    Raises:
        UserError: such a variable is set.
    """
    for variable, name in VARIABLES.items():
        if variable in environment:
            reason, hint = REJECTED[name]
            raise UserError(variable, f"is set, which sbatch treats as --{name}, but {reason}", f"unset it; {hint}")
    for variable, option in OVERRIDING.items():
        if variable in environment and option in given_options:
            problem = f"is set to {environment[variable]!r}, which overrides {option} in sbatch"
            raise UserError(variable, problem, f"unset it, or omit {option}")


def _names(word: str) -> Iterator[str]:
    """Yield the long names of the options in a word, with abbreviations of rejected options expanded as sbatch does."""
    if word.startswith("--"):
        name = word[2:].partition("=")[0]
        yield name if name in REJECTED else next((full for full in REJECTED if name and full.startswith(name)), name)
        return
    for letter in word[1:]:
        yield _SHORT.get(letter, letter)
        if letter not in _SHORT_WITHOUT_VALUE:  # the rest of the word is the option's value
            return


def _value(words: list[str], option: str) -> str:
    """Return the value of an option that is a separate word, or an empty string."""
    return words[words.index(option) + 1] if option in words[:-1] else ""
