"""Benchmark of training steps: variants of a configuration are trained one after the other, each in new processes."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from kernels.bench.timing import Ceilings
from megatron_ext.bench.train.measure import Measured, StepCounts
from megatron_ext.bench.train.plain_megatron import check_plain
from megatron_ext.bench.train.rank import FAILED, MACHINE, MEASURED, Job, describe_training_machine, write_job
from megatron_ext.bench.train.report import TrainingReport, TrainingRow
from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.random_data import make_random_data
from megatron_ext.launch.local import launch, rank_command
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.utils.errors import EXIT_USER_ERROR, UserError
from megatron_ext.utils.temp_dirs import scratch_folder

RANK = "train-rank"
"""Internal subject of `selectron bench` with which ranks are started."""

VARIANT_HINT = "write NAME:key=value,key=value or NAME:overlay.yaml"

_SHARD_TOKENS = 1 << 22
_SEED = 0
_SIGNAL_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_MAX_REASON_LENGTH = 300
"""Maximum length of a failure reason in the table, in characters."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Variant of a configuration.

    Attributes:
        name: name in the table.
        overrides: overrides of the common configuration.
        config: whole configuration; None: the configuration is invalid.
        error: reason why the variant cannot be trained; None: it can be trained.
        plain: True if megatron-core alone builds the model; see `plain_megatron`.
    """

    name: str
    overrides: tuple[str, ...]
    config: RunConfig | None = None
    error: str | None = None
    plain: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Settings of the benchmark, other than the variants.

    Attributes:
        processes: number of processes that train each variant.
        step_counts: numbers of warm-up, timed and profiled steps.
        vocabulary: vocabulary size of the model; None: that of the data.
        prepared: True if the configured data is read instead of random tokens.
    """

    processes: int
    step_counts: StepCounts
    vocabulary: int | None
    prepared: bool


def parse_variant(text: str, option: str = "--variant") -> tuple[str, tuple[str, ...]]:
    """Split `NAME:key=value,...` into name and overrides. A comma that no key or file follows belongs to the value.

    Args:
        text: text to split.
        option: command-line option that contained the text, for the message.

    Raises:
        UserError: the format is invalid.
    """
    name, colon, overrides_text = text.partition(":")
    if not colon or not re.fullmatch(r"[\w.+-]+", name):
        raise UserError(option, f"{text!r} is not a variant", VARIANT_HINT)
    parts = re.split(r",(?=\s*[A-Za-z_]\w*(?:\.\w+)+=|[^,=]+\.ya?ml(?:,|$))", overrides_text)
    return name, tuple(part.strip() for part in parts if part.strip())


def read_variants(
    path: Path, overrides: Sequence[str], texts: Sequence[str], processes: int, plain: Sequence[str] = ()
) -> list[Variant]:
    """Return the variants of a configuration, including those that cannot be trained.

    If no variants are given, the configuration itself is the only variant.

    Args:
        path: path of the configuration.
        overrides: overrides that all variants share.
        texts: variants in the format of `parse_variant`.
        processes: number of processes that train each variant.
        plain: variants whose model megatron-core alone builds, in the same format. They come first.

    Raises:
        UserError: the common configuration cannot be read, or cannot be trained and there are no variants; or a variant
            is malformed or a duplicate.
    """
    common_config = load_config(path, overrides, load_all())
    if not texts and not plain:
        check(common_config, processes, load_all())
        return [Variant(name=path.stem, overrides=(), config=common_config)]
    variants: dict[str, Variant] = {}
    for is_plain, text in [*((True, text) for text in plain), *((False, text) for text in texts)]:
        option = "--plain" if is_plain else "--variant"
        name, variant_overrides = parse_variant(text, option)
        if name in variants:
            raise UserError(option, f"{name!r} is given twice", "give each variant its own name")
        variants[name] = Variant(name=name, overrides=variant_overrides, plain=is_plain)
        try:
            config = load_config(path, [*overrides, *variant_overrides], load_all())
            variants[name] = replace(variants[name], config=config)
            check(config, processes, load_all())
            if is_plain:
                check_plain(config)
        except UserError as error:
            variants[name] = replace(variants[name], error=str(error))
    return list(variants.values())


def bench(
    variants: Sequence[Variant],
    plan: TrainingPlan,
    identity: Mapping[str, Any],
    *,
    report_progress: Callable[[str], None] = print,
    save: Callable[[TrainingReport], None] | None = None,
) -> tuple[TrainingReport, int]:
    """Measure every variant.

    Args:
        variants: variants in the order of the rows.
        plan: settings of the benchmark.
        identity: fields of the report that identify the run; see `run_identity`.
        report_progress: function called with a line of text before and after each variant.
        save: function called with the report after each row, so that an interrupted benchmark keeps its results.

    Returns:
        Report and exit code. If a signal ended the benchmark, the code is that of the signal. Otherwise it is 1 if a
        variant failed, else 0.
    """
    with scratch_folder("bench") as folder:
        machine, ceilings = _measure_machine(folder)
        report = TrainingReport(
            **identity,
            machine=machine,
            ceilings=ceilings,
            step_counts=plan.step_counts,
            prepared=plan.prepared,
            rows=[],
        )
        if save is not None:
            save(report)  # fail before measuring if the folder cannot be written
        random_data = None if plan.prepared else _random_data(folder / "data", variants, plan)
        for number, variant in enumerate(variants):
            report_progress(f"{variant.name} ...")
            row, code = _train_variant(folder / str(number), variant, plan, random_data)
            report.rows.append(row)
            report_progress(f"{variant.name}: {row.summary}")
            if save is not None:
                save(report)
            if code in _SIGNAL_CODES:
                return report, code
    return report, 1 if any(row.failed for row in report.rows) else 0


def _random_data(folder: Path, variants: Sequence[Variant], plan: TrainingPlan) -> Path:
    """Write a data folder with as many random tokens as the longest variant reads, up to a maximum."""
    steps = plan.step_counts.warm_up + plan.step_counts.steps + plan.step_counts.profiled + 1
    configs = [variant.config for variant in variants if variant.config is not None]
    lengths = [(config.data.seq_length, config.training.global_batch_size) for config in configs]
    needed = [2 * (length + 1) + min(_SHARD_TOKENS, steps * batch * length) for length, batch in lengths]
    assert plan.vocabulary is not None, "random tokens have no tokenizer"
    make_random_data(folder, 1, max(needed, default=1), _SEED, plan.vocabulary)
    return folder


def _measure_machine(folder: Path) -> tuple[dict[str, str | None], Ceilings | None]:
    """Describe this machine and measure its GPU's ceilings in a separate process, which frees the GPU's memory.

    Raises:
        UserError: the GPU does not work.
    """
    if not torch.cuda.is_available():
        return describe_training_machine(torch.device("cpu")), None
    code = launch(rank_command("bench", [RANK, "--machine", str(folder)]), 1)
    if code:
        problem = f"the GPU cannot be measured: {_reason(folder, code)}"
        raise UserError("run.device", problem, "check for other processes with nvidia-smi, and run `selectron doctor`")
    results = json.loads((folder / MACHINE).read_bytes())
    return results["machine"], Ceilings(**results["ceilings"])


def _train_variant(
    folder: Path, variant: Variant, plan: TrainingPlan, random_data: Path | None
) -> tuple[TrainingRow, int]:
    """Train a variant, and return its row and the exit code of its processes."""
    config = None if variant.config is None else TypeAdapter(RunConfig).dump_python(variant.config, mode="json")
    row = TrainingRow(
        name=variant.name,
        overrides=variant.overrides,
        config=config,
        processes=plan.processes,
        plain=variant.plain,
    )
    if variant.error is not None or variant.config is None:
        return row.with_failure(str(variant.error)), EXIT_USER_ERROR
    folder.mkdir()
    job = Job(
        config=variant.config,
        vocabulary=plan.vocabulary,
        random_data=random_data,
        step_counts=plan.step_counts,
        plain=variant.plain,
    )
    write_job(folder, job)
    started = time.perf_counter()
    code = launch(rank_command("bench", [RANK, str(folder)]), plan.processes)
    row = replace(row, wall_seconds=time.perf_counter() - started)
    if code:
        return row.with_failure(_reason(folder, code)), code
    return row.with_measurements(TypeAdapter(Measured).validate_json((folder / MEASURED).read_bytes())), 0


def _reason(folder: Path, code: int) -> str:
    """Return the error of the first rank that failed, or its exit code or signal if it reported none."""
    error_file = folder / FAILED
    if error_file.exists():
        return error_file.read_text()[:_MAX_REASON_LENGTH]
    if code > 128:
        name = signal.Signals(code - 128).name
        return f"terminated by {name}" + (" (possibly out of memory)" if name == "SIGKILL" else "")
    return f"exited with code {code}"
