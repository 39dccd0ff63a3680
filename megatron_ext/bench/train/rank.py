"""Rank of a measured training run, started by `selectron bench train`.

The folder contains the job (`write_job`) and then the results: `measured.json`, or `failed.txt` with the error of the
first rank that failed. Every run has its own processes, so that none inherits another's memory.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from kernels.bench.bench_report import describe_machine, version
from kernels.bench.contestant import one_line
from kernels.bench.timing import CudaMeter
from megatron_ext.bench.processes import is_first_rank, process_groups
from megatron_ext.bench.train.measure import StepCounts, measure
from megatron_ext.config.load import load_config
from megatron_ext.config.save import save_config
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.datasets import open_data
from megatron_ext.data.opening import open_samples
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.platform.device import platform_for_run, select_platform
from megatron_ext.run_folder.layout import CONFIG
from megatron_ext.utils import error_reporting
from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.errors import EXIT_USER_ERROR, UserError

MEASURED, FAILED, MACHINE = "measured.json", "failed.txt", "machine.json"
_JOB, _CONFIG = "job.json", CONFIG
_REPEAT = 30
"""Timed repetitions for a ceiling, as in `selectron bench kernels`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job of the ranks.

    Attributes:
        config: to train.
        vocabulary: vocabulary size of the model; None: that of the data.
        random_data: prepared folder of random tokens; None: use the configured data.
        step_counts: numbers of steps.
        plain: the model is megatron-core's own.
    """

    config: RunConfig
    vocabulary: int | None
    random_data: Path | None
    step_counts: StepCounts
    plain: bool = False


def write_job(folder: Path, job: Job) -> None:
    """Write the job of the ranks to a folder."""
    save_config(job.config, folder / _CONFIG)
    random = None if job.random_data is None else str(job.random_data)
    fields = {
        "vocabulary": job.vocabulary,
        "random_data": random,
        "amount": asdict(job.step_counts),
        "plain": job.plain,
    }
    write_atomically(folder / _JOB, json.dumps(fields).encode())


def read_job(folder: Path) -> Job:
    """Read the job of the ranks."""
    fields = json.loads((folder / _JOB).read_bytes())
    random = None if fields["random_data"] is None else Path(fields["random_data"])
    config = load_config(folder / _CONFIG, [], load_all())
    step_counts = StepCounts(**fields["amount"])
    return Job(
        config=config,
        vocabulary=fields["vocabulary"],
        random_data=random,
        step_counts=step_counts,
        plain=fields["plain"],
    )


def describe_training_machine(device: torch.device) -> dict[str, str | None]:
    """Describe this machine and the versions of the training packages; None: not installed."""
    packages = ("megatron-core", "transformer-engine", "deepspeed")
    count = str(torch.cuda.device_count()) if device.type == "cuda" else None
    return {"gpus": count} | describe_machine(device) | {name: version(name) for name in packages}


def _measure_machine(folder: Path) -> None:
    """Write the description of the machine and the ceilings of its first GPU to a folder."""
    device = select_platform("cuda").device
    ceilings = CudaMeter(device, _REPEAT).ceilings()
    results = {"machine": describe_training_machine(device), "ceilings": ceilings._asdict()}
    write_atomically(folder / MACHINE, json.dumps(results).encode())


def run(folder: Path) -> None:
    """Execute a rank's part of the job in a folder."""
    job = read_job(folder)
    platform = platform_for_run(job.config.run.device, job.config.parallel)
    with process_groups(job.config, platform) as groups:
        try:
            samples, vocabulary = _open_samples(job)
            measured = measure(job.config, vocabulary, samples, groups, platform, job.step_counts, plain=job.plain)
            if is_first_rank():
                write_atomically(folder / MEASURED, json.dumps(asdict(measured)).encode())
            dist.barrier()
        except Exception as error:  # exit at once: proper destruction of the groups needs all ranks
            _exit_now(_report_failure(folder, error))


def _open_samples(job: Job) -> tuple[TrainingSamples, int]:
    data, seed = job.config.data, job.config.training.seed
    if job.random_data is not None:
        assert job.vocabulary is not None, "random tokens have no tokenizer"
        return open_samples(job.random_data, data.seq_length, seed)[0], job.vocabulary
    opened = open_data(data, seed)
    return opened.samples, opened.vocab_size if job.vocabulary is None else job.vocabulary


def _report_failure(folder: Path, error: Exception) -> int:
    """Report an error in the folder (first rank only) and on standard error."""
    with suppress(OSError):
        error_reporting.create_once(folder / FAILED, str(error) if isinstance(error, UserError) else one_line(error))
    if isinstance(error, UserError):
        error_reporting.report_user_error(str(error))
        return EXIT_USER_ERROR
    traceback.print_exc()
    return 1


def run_rank(folder: Path, *, only_machine: bool) -> int:
    """Execute a rank's part of the job in a folder, or describe the machine there.

    Returns:
        Exit code.
    """
    try:
        _measure_machine(folder) if only_machine else run(folder)
    except Exception as error:  # shown in the table
        return _report_failure(folder, error)
    return 0


def _exit_now(code: int) -> NoReturn:
    """Exit at once: threads of communication libraries may never end, and the other ranks are waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
