"""Summary at the start of a run's log: model, layout, data, tokens and output files."""

from __future__ import annotations

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.layout import layout_of, sequence_parallel
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.datasets import RunData
from megatron_ext.parallel.parameters import ParameterCount
from megatron_ext.run_folder.layout import EVALUATION, METRICS, TENSORBOARD
from megatron_ext.training.run_context import RunContext
from megatron_ext.utils.credentials import redact
from megatron_ext.utils.printable import printable


def format_header(context: RunContext, data: RunData, size: ParameterCount, progress: Progress, world_size: int) -> str:
    """Summarise a run that is about to train.

    Args:
        context: settings and environment of the run.
        data: data of the run.
        size: number of parameters of the whole model.
        progress: progress that the run starts from.
        world_size: number of processes.

    Returns:
        Text with one line per subject.
    """
    config, folder = context.config, context.folder
    training, length = config.training, config.data.seq_length
    origin = "from the start" if progress.step == 0 else f"from step {progress.step:,}"
    embeddings = size.embedding_parameters + size.output_layer_parameters
    per_step = training.global_batch_size * length
    available = sum(
        entry.tokens for entry in data.manifest.domains if entry.split == "train" and entry.domain in data.train_domains
    )
    total = training.steps * per_step
    rows = [
        ("run", f"{folder}, {origin} to step {training.steps:,}"),
        (
            "model",
            f"{config.model.pattern}: {size.parameters:,} parameters, {embeddings:,} of them in embedding and output "
            f"layer; {training.precision}" + ("" if training.fp8 == "none" else f", {training.fp8} fp8"),
        ),
        ("layout", f"{_format_layout(config, world_size)}, on {context.platform.device.type}"),
        ("data", f"{redact(config.data.path)}: {available:,} tokens of {_format_names(data.train_domains)}"),
        (
            "tested on",
            _format_names(data.test_domains) if data.test_domains else "validation text of the same domains only",
        ),
        (
            "tokens",
            f"{training.global_batch_size:,} samples of {length:,} per step, {total:,} in total: "
            f"{total / available:.3g} times the data",
        ),
        ("results", f"{_format_files(config)} and checkpoints/ in {folder}"),
    ]
    return "\n".join(f"{name:<10}{printable(value)}" for name, value in rows)


def _format_files(config: RunConfig) -> str:
    """Name the files of the records."""
    board = [f"{TENSORBOARD}/"] if TENSORBOARD in config.logging.backends else []
    return ", ".join([METRICS, EVALUATION, *board])


def _format_layout(config: RunConfig, world_size: int) -> str:
    layout, p = layout_of(config, world_size), config.parallel
    sizes = [("tensor", p.tensor), ("context", p.context), ("pipeline", p.pipeline)]
    parts = [f"{name} {size}" for name, size in sizes if size > 1]
    if sequence_parallel(config):
        parts.insert(1, "sequence parallel")
    parts.append(f"data {layout.data_parallel_size}")
    processes = f"{layout.world_size} process" + ("es" if layout.world_size > 1 else "")
    samples = f"{layout.num_micro_batches} x {config.training.micro_batch_size} samples per replica and step"
    return f"{processes}: {', '.join(parts)}; {samples}"


def _format_names(domains: list[str], limit: int = 6) -> str:
    more = f" and {len(domains) - limit} more" if len(domains) > limit else ""
    return ", ".join(domains[:limit]) + more
