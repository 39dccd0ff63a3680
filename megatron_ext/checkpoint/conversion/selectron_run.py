"""Runs of ours: reading a checkpoint, and writing a run folder around one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.conversion.family import SavedModel
from megatron_ext.checkpoint.conversion.forms import CHECKPOINTS
from megatron_ext.checkpoint.conversion.saved import PRECISION, configured_model, identity_of, mixer_fields, saved_model
from megatron_ext.checkpoint.conversion.source import Source, SourceOptions, Training
from megatron_ext.checkpoint.conversion.tensors import VOCABULARY, Tensors, without_padding
from megatron_ext.checkpoint.conversion.tokenizer_files import kept_tokenizer
from megatron_ext.checkpoint.folder import RECORD, CheckpointFolder, Progress, Record, Retention
from megatron_ext.config.load import read_tree
from megatron_ext.config.save import tree_to_yaml
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.checkpoint.conversion.torch_dist import OptimizerState, TorchDistTensors

CONFIG = "config.yaml"


def open_run(path: Path, options: SourceOptions) -> Source:
    """The newest checkpoint of a run.

    Raises:
        UserError: there is none, or it is damaged.
    """
    return open_step(newest_step(path), options)


def newest_step(path: Path) -> Path:
    """The folder of a run's newest checkpoint.

    Args:
        path: folder of the run, or of its checkpoints.

    Raises:
        UserError: there is none.
    """
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    step = CheckpointFolder(root).latest()
    if step is None:
        raise UserError(str(root), "holds no checkpoint", "train the run until it has written one")
    return root / f"step_{step}"


def open_step(path: Path, options: SourceOptions) -> Source:
    """One checkpoint of a run.

    Raises:
        UserError: it is damaged, or does not say what model it holds.
    """
    from megatron_ext.checkpoint.conversion.torch_dist import TorchDistTensors

    record = checked_record(path)
    stored = TorchDistTensors(path)
    source = source_of(path, record, stored, options, has_optimizer=stored.has_optimizer)
    return replace(source, training=_training(source, record, stored, is_told=options.model_config is not None))


def checked_record(path: Path) -> Record:
    """The record of a checkpoint all of whose files are as it says.

    Raises:
        UserError: one is not.
    """
    step = path.resolve().name.removeprefix("step_")
    if not step.isdecimal():
        raise UserError(str(path), "is a checkpoint whose folder is not called step_N", "give it its name back")
    checkpoints = CheckpointFolder(path.resolve().parent, "give the folder of another step")
    record = checkpoints.read_record(int(step))
    for name, content in record.files.items():
        checkpoints.check_file(int(step), name, content)
    return record


def source_of(path: Path, record: Record, stored: Tensors, options: SourceOptions, *, has_optimizer: bool) -> Source:
    """A checkpoint without the state of its training.

    Args:
        path: its folder.
        record: its record.
        stored: its tensors.
        options: what a user says of it.
        has_optimizer: whether its optimizer's state is there.

    Raises:
        UserError: it does not say what model it holds.
    """
    tokenizer = kept_tokenizer(_run(path), options.tokenizer)
    saved = _saved(path, record, stored, options, tokenizer.size if tokenizer else None)
    return Source(
        path=path,
        format="selectron",
        saved=saved,
        stored=stored,
        tensors=without_padding(stored, saved.vocab_size),
        tokenizer=tokenizer,
        progress=record.progress,
        has_optimizer=has_optimizer,
    )


def _run(path: Path) -> Path:
    """The folder of the run that a checkpoint is of."""
    return path.resolve().parents[1]


def _training(source: Source, record: Record, stored: TorchDistTensors, *, is_told: bool) -> Training | None:
    """What the run goes on from. A record that did not say all of the model is completed with what the user said."""
    from megatron_ext.checkpoint.conversion.torch_dist import read_optimizer

    saved, run = source.saved, _run(source.path)
    optimizer = read_optimizer(stored, source.path)
    if optimizer is None or record.model_only:
        return None
    told = identity_of(saved, record.identity[PRECISION]) if is_told and PRECISION in record.identity else {}
    config = read_tree(run / CONFIG) if (run / CONFIG).is_file() else None
    return Training(tensors=stored, optimizer=optimizer, identity={**record.identity, **told}, config=config)


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
    identity = identity_of(saved, precision)
    _write_checkpoint(folder, progress, tensors, None, {"identity": identity, "generators": [], "model_only": True})
    (folder / CONFIG).write_text(_config(saved, precision, folder.parent, name))


def write_training(saved: SavedModel, training: Training, progress: Progress, folder: Path, name: str) -> None:
    """Write a run's folder with one checkpoint, from which `selectron train --resume` goes on.

    The generators' states are left out: they are of one layout, and nothing is drawn from them.

    Args:
        saved: the model, as it was trained.
        training: its state.
        progress: how far it was.
        folder: of the run; exists.
        name: of the run.

    Raises:
        OSError: the disk refuses.
    """
    parts = {"identity": training.identity, "generators": []}
    _write_checkpoint(folder, progress, training.tensors, training.optimizer, parts)
    if training.config is None:
        text = _config(saved, training.identity[PRECISION], folder.parent, name)
    else:
        section = {**(training.config.get("run") or {}), **_place(folder.parent, name)}
        text = tree_to_yaml({**training.config, "run": section})
    (folder / CONFIG).write_text(text)


def _write_checkpoint(
    folder: Path, progress: Progress, tensors: Tensors, optimizer: OptimizerState | None, parts: dict[str, Any]
) -> None:
    from megatron_ext.checkpoint.conversion.torch_dist import write_torch_dist

    checkpoints = CheckpointFolder(folder / CHECKPOINTS)
    written = write_torch_dist(tensors, checkpoints.begin(progress.step), optimizer)
    checkpoints.finish(progress.step, {"progress": progress, **parts}, written, Retention())


def _place(runs: Path, name: str) -> dict[str, str]:
    return {"dir": str(runs), "name": name}


def _config(saved: SavedModel, precision: str, runs: Path, name: str) -> str:
    """A configuration of which the model is known; of the data, that it has to be named."""
    tree = {
        "data": {"path": "data", "seq_length": saved.seq_length},
        "model": asdict(saved.model),
        "mixers": {mixer: mixer_fields(config) for mixer, config in saved.mixers.items()},
        "training": {"precision": precision},
        "run": _place(runs, name),
    }
    return tree_to_yaml(tree)
