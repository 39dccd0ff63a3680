"""Runs of ours: reading a checkpoint's model, and writing a run folder around one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from megatron_ext.checkpoint.conversion.family import SavedModel
from megatron_ext.checkpoint.conversion.our_model import VOCABULARY
from megatron_ext.checkpoint.conversion.saved import configured_model, identity_of, mixer_fields, saved_model
from megatron_ext.checkpoint.conversion.source import Source, SourceOptions
from megatron_ext.checkpoint.conversion.tensors import Tensors, without_padding
from megatron_ext.checkpoint.conversion.tokenizer_files import kept_tokenizer
from megatron_ext.checkpoint.conversion.torch_dist import TorchDistTensors, write_torch_dist
from megatron_ext.checkpoint.folder import LATEST, RECORD, CheckpointFolder, Progress, Record, Retention
from megatron_ext.config.save import tree_to_yaml
from megatron_ext.errors import UserError

CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, or of a run's checkpoints."""
    return (path / CHECKPOINTS).is_dir() or (path / LATEST).is_file()


def open_run(path: Path, options: SourceOptions) -> Source:
    """The newest checkpoint of a run.

    Raises:
        UserError: there is none, or it is damaged.
    """
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    step = CheckpointFolder(root).latest()
    if step is None:
        raise UserError(str(root), "holds no checkpoint", "train the run until it has written one")
    return open_step(root / f"step_{step}", options)


def open_step(path: Path, options: SourceOptions) -> Source:
    """One checkpoint of a run.

    Raises:
        UserError: it is damaged, or does not say what model it holds.
    """
    step = path.resolve().name.removeprefix("step_")
    if not step.isdecimal():
        raise UserError(str(path), "is a checkpoint whose folder is not called step_N", "give it its name back")
    checkpoints = CheckpointFolder(path.resolve().parent)
    record = checkpoints.read_record(int(step))
    for name, content in record.files.items():
        checkpoints.check_file(int(step), name, content)
    stored = TorchDistTensors(path)
    tokenizer = kept_tokenizer(path.resolve().parents[1], options.tokenizer)
    saved = _saved(path, record, stored, options, tokenizer.size if tokenizer else None)
    return Source(
        path=path,
        format="selectron",
        saved=saved,
        stored=stored,
        tensors=without_padding(stored, saved.vocab_size, VOCABULARY),
        tokenizer=tokenizer,
        progress=record.progress,
        has_optimizer=stored.has_optimizer,
    )


def _saved(path: Path, record: Record, stored: Tensors, options: SourceOptions, tokens: int | None) -> SavedModel:
    if options.model_config is None:
        return saved_model(record.identity, str(path / RECORD))
    rows = stored.infos()[VOCABULARY[0]].shape[0]
    return configured_model(options.model_config, rows if tokens is None else tokens)


def write_run(saved: SavedModel, tensors: Tensors, precision: str, progress: Progress, folder: Path, name: str) -> None:
    """Write a run's folder with one checkpoint, of the model alone.

    Args:
        saved: the model.
        tensors: ours, without vocabulary padding.
        precision: of the run that goes on from here: bf16 or fp32.
        progress: how far the training was.
        folder: of the run; exists.
        name: of the run.

    Raises:
        OSError: the disk refuses.
    """
    checkpoints = CheckpointFolder(folder / CHECKPOINTS)
    written = write_torch_dist(tensors, checkpoints.begin(progress.step))
    parts = {"progress": progress, "identity": identity_of(saved, precision), "generators": [], "model_only": True}
    checkpoints.finish(progress.step, parts, written, Retention())
    (folder / CONFIG).write_text(_config(saved, precision, folder.parent, name))


def _config(saved: SavedModel, precision: str, runs: Path, name: str) -> str:
    """A configuration of which the model is known; of the data, that it has to be named."""
    tree = {
        "data": {"path": "data", "seq_length": saved.seq_length},
        "model": asdict(saved.model),
        "mixers": {mixer: mixer_fields(config) for mixer, config in saved.mixers.items()},
        "training": {"precision": precision},
        "run": {"dir": str(runs), "name": name},
    }
    return tree_to_yaml(tree)
