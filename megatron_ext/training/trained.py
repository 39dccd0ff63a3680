"""A trained run, opened to be used: its model in one process, whatever layout it was trained in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data_prep.manifest import TokenizerEntry, load_manifest
from megatron_ext.checkpoint.folder import Record
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
        shape: what the model is built from in one process.
        seed: of the run.
        tokenizer: what made its tokens.
        tokenizer_file: its tokenizer.json.
        platform: where this process computes.
    """

    folder: Path
    shape: ModelShape
    seed: int
    tokenizer: TokenizerEntry
    tokenizer_file: Path
    platform: Platform


def open_run(folder: Path) -> TrainedRun:
    """Read what a run was, for use on this machine in one process.

    Raises:
        UserError: no run is there, or its data's manifest or tokenizer is missing.
    """
    if not (folder / CONFIG).is_file():
        problem = f"holds no {CONFIG}" if folder.is_dir() else "is no folder"
        raise UserError(str(folder), problem, "give the folder of a run: run.dir/run.name")
    config = _for_one_process(load_config(folder / CONFIG, [], load_all()))
    root = Path(config.data.path)
    manifest = load_manifest(root)
    tokenizer_file = check_tokenizer(root, manifest, Path(config.data.tokenizer) if config.data.tokenizer else None)
    platform = select_platform()
    shape = model_shape(config, platform, manifest.tokenizer.vocab_size)
    return TrainedRun(folder, shape, config.training.seed, manifest.tokenizer, tokenizer_file, platform)


def _for_one_process(config: RunConfig) -> RunConfig:
    """The run's configuration without what belongs to the machines it was trained on."""
    return replace(config, parallel=ParallelConfig(), run=replace(config.run, device="auto", backend="auto"))


@contextmanager
def trained_model(run: TrainedRun, step: int | None = None) -> Iterator[torch.nn.Module]:
    """The model of a run, with the weights of a checkpoint; within a process group of this process alone.

    Args:
        run: whose model.
        step: of the checkpoint; None: the newest.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    with groups_of_one_process(run.platform.communication) as groups:
        store = CheckpointStore(run.folder / CHECKPOINTS, {}, groups, run.platform)
        record = _record(store, step)
        (model,) = build_model(run.shape, run.platform, groups, run.seed)
        store.load_model([model], record)
        yield model


def _record(store: CheckpointStore, step: int | None) -> Record:
    step = store.folder.latest() if step is None else step
    if step is None:
        raise UserError(str(store.folder.root), "holds no checkpoint", "train the run until it has written one")
    return store.check(step)
