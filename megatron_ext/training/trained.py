"""A trained run, opened to be used: its model in one process, whatever layout it was trained in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data_prep.manifest import load_manifest
from megatron_ext.checkpoint.conversion.tokenizer_files import KeptTokenizer, kept_tokenizer
from megatron_ext.checkpoint.folder import CheckpointFolder, Record
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import ParallelConfig, RunConfig
from megatron_ext.data.verify import check_tokenizer
from megatron_ext.errors import UserError
from megatron_ext.mixers.registry import load_all
from megatron_ext.model import ModelShape, build_model
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform import Platform, select_platform
from megatron_ext.training.build import model_shape
from megatron_ext.training.run import CHECKPOINTS, CONFIG


@dataclass(frozen=True)
class TrainedRun:
    """What a run folder says of its model, found whole.

    Attributes:
        folder: of the run.
        record: of the checkpoint to use.
        shape: what the model is built from in one process.
        seed: of the run.
        tokenizer: what made its tokens.
        platform: where this process computes.
    """

    folder: Path
    record: Record
    shape: ModelShape
    seed: int
    tokenizer: KeptTokenizer
    platform: Platform


def open_run(folder: Path, step: int | None = None) -> TrainedRun:
    """Read what a run was, for use on this machine in one process.

    Args:
        folder: of the run.
        step: of the checkpoint that will be used; None: the newest.

    Raises:
        UserError: no run or no such checkpoint is there, or its tokenizer is missing.
    """
    if not (folder / CONFIG).is_file():
        problem = f"holds no {CONFIG}" if folder.is_dir() else "is no folder"
        raise UserError(str(folder), problem, "give the folder of a run: run.dir/run.name")
    config = _for_one_process(load_config(folder / CONFIG, [], load_all()))
    record = _record(CheckpointFolder(folder / CHECKPOINTS), step)
    tokenizer = _tokenizer(folder, config)
    platform = select_platform()
    # A converted model may have rows for more tokens than its tokenizer knows.
    shape = model_shape(config, platform, record.identity.get("data.vocab_size", tokenizer.size))
    return TrainedRun(folder, record, shape, config.training.seed, tokenizer, platform)


def _tokenizer(folder: Path, config: RunConfig) -> KeptTokenizer:
    """The tokenizer that the run keeps, or else, as earlier versions kept none, its data's."""
    kept = kept_tokenizer(folder)
    if kept is not None:
        return kept
    root = Path(config.data.path)
    manifest = load_manifest(root)
    given = Path(config.data.tokenizer) if config.data.tokenizer else None
    entry, file = manifest.tokenizer, check_tokenizer(root, manifest, given)
    return KeptTokenizer(file, entry.eos_token, entry.eos_id, entry.vocab_size)


def _for_one_process(config: RunConfig) -> RunConfig:
    """The run's configuration without what belongs to the machines it was trained on."""
    return replace(config, parallel=ParallelConfig(), run=replace(config.run, device="auto", backend="auto"))


@contextmanager
def trained_model(run: TrainedRun) -> Iterator[torch.nn.Module]:
    """The model of a run, with the weights of a checkpoint; within a process group of this process alone.

    Args:
        run: whose model.

    Raises:
        UserError: the checkpoint is damaged.
    """
    with groups_of_one_process(run.platform.communication) as groups:
        store = CheckpointStore(run.folder / CHECKPOINTS, {}, groups, run.platform)
        (model,) = build_model(run.shape, run.platform, groups, run.seed)
        store.load_model([model], store.check(run.record.progress.step))
        yield model


def _record(checkpoints: CheckpointFolder, step: int | None) -> Record:
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise UserError(str(checkpoints.root), "holds no checkpoint", "train the run until it has written one")
    return checkpoints.read_record(step)
