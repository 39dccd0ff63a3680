"""Trained runs opened for use: the model under any layout, independent of the training layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from data_prep.manifest import load_manifest
from megatron_ext.checkpoint.folder import CheckpointFolder, Record
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import ParallelConfig, RunConfig
from megatron_ext.data.verify import check_tokenizer
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.build import build_model
from megatron_ext.model.meta_device import on_meta, reject_impossible_sizes
from megatron_ext.model.shape import ModelShape, model_shape
from megatron_ext.parallel.agreement import raise_on_all_ranks
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform.device import Platform, platform_for_run
from megatron_ext.run_folder.layout import CHECKPOINTS, CONFIG
from megatron_ext.runs.identity import VOCAB_SIZE
from megatron_ext.runs.tokenizer import RunTokenizer, load_tokenizer, stored_tokenizer
from megatron_ext.utils.errors import UserError

MACHINE_DEFAULTS = {
    **{f"parallel.{field.name}": field.default for field in fields(ParallelConfig)},
    "run.device": "auto",
    "run.backend": "auto",
    "training.fp8": "none",
}
"""Fields that depend on the machines of the training run, with their values on another machine."""


_MAX_PADDING_BYTES = 1 << 27
"""Allowed excess of the model's parameters over the checkpoint's bytes: a converted model lacks vocabulary padding."""


@dataclass(frozen=True)
class TrainedRun:
    """Validated content of a run folder that describes the model.

    Attributes:
        folder: run folder.
        config: configuration of the run, with the fields of `MACHINE_DEFAULTS` and the overrides replaced.
        record: record of the checkpoint to use.
        shape: shape of the model.
        seed: seed of the run.
        tokenizer: tokenizer of the training data.
        platform: platform of this process.
    """

    folder: Path
    config: RunConfig
    record: Record
    shape: ModelShape
    seed: int
    tokenizer: RunTokenizer
    platform: Platform


def open_run(folder: Path, step: int | None = None, overrides: Sequence[str] = ()) -> TrainedRun:
    """Read a trained run for use on this machine, by default in one process.

    Args:
        folder: run folder.
        step: step of the checkpoint to use; None: the newest.
        overrides: changes of its configuration, `section.field=value`, e.g. a layout.

    Raises:
        UserError: the run or the checkpoint does not exist, or the tokenizer is missing.
    """
    if not (folder / CONFIG).is_file():
        problem = f"contains no {CONFIG}" if folder.is_dir() else "is not a directory"
        raise UserError(str(folder), problem, "give the folder of a run: run.dir/run.name")
    defaults = [f"{name}={json.dumps(value)}" for name, value in MACHINE_DEFAULTS.items()]
    config = load_config(folder / CONFIG, [*defaults, *overrides], load_all())
    record = _read_record(CheckpointFolder(folder / CHECKPOINTS, _hint(folder)), step)
    tokenizer = _load_tokenizer(folder, config)
    platform = platform_for_run(config.run.device, config.parallel)
    # A converted model may have embedding rows for more tokens than its tokenizer has.
    shape = model_shape(config, platform, record.identity.get(VOCAB_SIZE, tokenizer.size))
    return TrainedRun(folder, config, record, shape, config.training.seed, tokenizer, platform)


def _load_tokenizer(folder: Path, config: RunConfig) -> RunTokenizer:
    """Return the tokenizer in the run folder, else that of the data: runs of earlier versions stored none."""
    stored = stored_tokenizer(folder)
    if stored is not None:
        return stored
    root = Path(config.data.path)
    manifest = load_manifest(root)
    tokenizer_path = Path(config.data.tokenizer) if config.data.tokenizer else None
    return load_tokenizer(check_tokenizer(root, manifest, tokenizer_path), manifest.tokenizer)


@contextmanager
def loaded_model(run: TrainedRun) -> Iterator[torch.nn.Module]:
    """Context manager that yields the model of a run with its trained weights, in a single-process group.

    Args:
        run: run whose model is loaded.

    Raises:
        UserError: the checkpoint is damaged.
    """
    with groups_of_one_process(run.platform.communication) as groups:
        (model,) = load_chunks(run, groups)
        yield model


def load_chunks(run: TrainedRun, groups: ProcessGroupCollection) -> list[MegatronModule]:
    """Build this rank's model chunks and load the checkpoint's weights; a collective call.

    Args:
        run: run whose model is loaded.
        groups: process groups of the layout `run.config.parallel`.

    Raises:
        UserError: the checkpoint is damaged, or the configured model is larger than the checkpoint.
    """
    store = CheckpointStore(run.folder / CHECKPOINTS, {}, groups, run.platform, choose_hint=_hint(run.folder))
    record = store.check(run.record.progress.step)
    config_path = str(run.folder / CONFIG)

    def check_parameters() -> None:
        with reject_impossible_sizes(config_path), on_meta():
            meta_chunks = build_model(run.shape, run.platform, groups, seed=None)
        _check_parameters(meta_chunks, sum(content.size for content in record.files.values()), config_path)

    if not run.platform.is_cuda:  # on a GPU an allocation that is too large fails at once
        raise_on_all_ranks(check_parameters)
    with reject_impossible_sizes(config_path):
        chunks = build_model(run.shape, run.platform, groups, run.seed)
    store.load_model(chunks, record)
    return chunks


def _check_parameters(chunks: Sequence[torch.nn.Module], num_bytes: int, config_path: str) -> None:
    """Reject a model larger than its checkpoint before memory is allocated for it. Loading compares each shape."""
    named_parameters = [item for chunk in chunks for item in chunk.named_parameters()]
    if sum(parameter.numel() for _, parameter in named_parameters) <= num_bytes + _MAX_PADDING_BYTES:
        return
    name, largest = max(named_parameters, key=lambda item: item[1].numel())
    problem = f"gives {name} the shape {list(largest.shape)}, but the checkpoint has only {num_bytes} bytes"
    raise UserError(config_path, problem, "give the configuration that the model was trained with")


def _hint(folder: Path) -> str:
    """Return the advice for an unusable checkpoint, the same whether or not it was given by its own folder."""
    return f"give {folder} with another --step"


def _read_record(checkpoints: CheckpointFolder, step: int | None) -> Record:
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise UserError(str(checkpoints.root), "contains no checkpoint", "train the run until it has saved one")
    return checkpoints.read_record(step)
