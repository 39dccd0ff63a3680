"""One rank of a measured training run, as `selectron bench train` starts it.

The folder holds what is to be done (`write_job`), and then what was found: `measured.json`, or in `failed.txt` what the
rank said that failed first. Every run has processes of its own, so that none finds another's memory.
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

from kernels.bench.contestant import one_line
from kernels.bench.report import describe_machine, version
from kernels.bench.timing import CudaMeter
from megatron_ext.bench.processes import is_first, process_groups
from megatron_ext.bench.train_measure import Amount, measure
from megatron_ext.config.load import load_config
from megatron_ext.config.save import save_config
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.opening import open_samples
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.errors import EXIT_USER_ERROR, UserError
from megatron_ext.files import write_whole
from megatron_ext.launch import reporting
from megatron_ext.mixers.registry import load_all
from megatron_ext.platform import platform_of, select_platform
from megatron_ext.training.datasets import open_data

MEASURED, FAILED, MACHINE = "measured.json", "failed.txt", "machine.json"
_JOB, _CONFIG = "job.json", "config.yaml"
_REPEAT = 30
"""Timed runs of a ceiling, as `selectron bench kernels` has them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks are to do.

    Attributes:
        config: what they train.
        vocabulary: tokens of the model; None: those of the data.
        random_data: prepared folder of random tokens; None: the configuration's own data.
        amount: how many steps.
        plain: whether the model is megatron-core's own.
    """

    config: RunConfig
    vocabulary: int | None
    random_data: Path | None
    amount: Amount
    plain: bool = False


def write_job(folder: Path, job: Job) -> None:
    """Leave in a folder what ranks are to do."""
    save_config(job.config, folder / _CONFIG)
    random = None if job.random_data is None else str(job.random_data)
    fields = {"vocabulary": job.vocabulary, "random_data": random, "amount": asdict(job.amount), "plain": job.plain}
    write_whole(folder / _JOB, json.dumps(fields).encode())


def read_job(folder: Path) -> Job:
    """What ranks are to do."""
    fields = json.loads((folder / _JOB).read_bytes())
    random = None if fields["random_data"] is None else Path(fields["random_data"])
    config = load_config(folder / _CONFIG, [], load_all())
    amount = Amount(**fields["amount"])
    return Job(
        config=config,
        vocabulary=fields["vocabulary"],
        random_data=random,
        amount=amount,
        plain=fields["plain"],
    )


def about_machine(device: torch.device) -> dict[str, str | None]:
    """What this machine is, with the versions of what trains; None: it is not installed."""
    packages = ("megatron-core", "transformer-engine", "deepspeed")
    count = str(torch.cuda.device_count()) if device.type == "cuda" else None
    return {"gpus": count} | describe_machine(device) | {name: version(name) for name in packages}


def _measure_machine(folder: Path) -> None:
    """Leave in a folder what the machine is, and what its first GPU can do."""
    device = select_platform("cuda").device
    ceilings = CudaMeter(device, _REPEAT).ceilings()
    found = {"machine": about_machine(device), "ceilings": ceilings._asdict()}
    write_whole(folder / MACHINE, json.dumps(found).encode())


def run(folder: Path) -> None:
    """Do a rank's part of the job in a folder."""
    job = read_job(folder)
    platform = platform_of(job.config.run.device, job.config.parallel)
    with process_groups(job.config, platform) as groups:
        try:
            samples, vocabulary = _data(job)
            found = measure(job.config, vocabulary, samples, groups, platform, job.amount, plain=job.plain)
            if is_first():
                write_whole(folder / MEASURED, json.dumps(asdict(found)).encode())
            dist.barrier()
        except Exception as error:  # at once: to leave the groups in order, the others would have to be there
            _leave(_fail(folder, error))


def _data(job: Job) -> tuple[TrainingSamples, int]:
    data, seed = job.config.data, job.config.training.seed
    if job.random_data is not None:
        assert job.vocabulary is not None, "random tokens have no tokenizer"
        return open_samples(job.random_data, data.seq_length, seed)[0], job.vocabulary
    found = open_data(data, seed)
    return found.samples, found.vocab_size if job.vocabulary is None else job.vocabulary


def _fail(folder: Path, error: Exception) -> int:
    """Say what went wrong: in the folder, the first rank of all, and on standard error."""
    with suppress(OSError):
        reporting.claim(folder / FAILED, str(error) if isinstance(error, UserError) else one_line(error))
    if isinstance(error, UserError):
        reporting.report_user_error(str(error))
        return EXIT_USER_ERROR
    traceback.print_exc()
    return 1


def do(folder: Path, *, only_machine: bool) -> int:
    """Do a rank's part of the job in a folder, or leave there what the machine is.

    Returns:
        The exit code.
    """
    try:
        _measure_machine(folder) if only_machine else run(folder)
    except Exception as error:  # it belongs into the table
        return _fail(folder, error)
    return 0


def _leave(code: int) -> NoReturn:
    """End the process now: threads of communication libraries may never end, and the other ranks wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
