"""Reading of checkpoints of Selectron runs, and writing of a run folder with one checkpoint."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.folder import RECORD, CheckpointFolder, Progress, Record, Retention
from megatron_ext.config.load import read_tree
from megatron_ext.config.save import tree_to_yaml
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.core.saved_model import configured_model, identity_of, mixer_fields, saved_model
from megatron_ext.conversion.core.source import Source, SourceOptions, Training
from megatron_ext.conversion.core.tensors import VOCABULARY, Tensors, without_padding
from megatron_ext.run_folder.layout import CHECKPOINTS, CONFIG, parse_step_name, step_name
from megatron_ext.runs.identity import PRECISION
from megatron_ext.runs.tokenizer_files import find_tokenizer
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.conversion.megatron.torch_dist import OptimizerState, TorchDistTensors


def open_run(path: Path, options: SourceOptions) -> Source:
    """Open the newest checkpoint of a run.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    return open_step(newest_step(path), options)


def newest_step(path: Path) -> Path:
    """Return the folder of a run's newest checkpoint.

    Args:
        path: folder of the run, or of its checkpoints.

    Raises:
        UserError: there is no checkpoint.
    """
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    step = CheckpointFolder(root).latest()
    if step is None:
        raise UserError(str(root), "contains no checkpoint", "train the run until it has written one")
    return root / step_name(step)


def open_step(path: Path, options: SourceOptions) -> Source:
    """Open one checkpoint of a run.

    Raises:
        UserError: the checkpoint is damaged, or its record lacks fields of the model.
    """
    from megatron_ext.conversion.megatron.torch_dist import TorchDistTensors

    record = read_checked_record(path)
    stored = TorchDistTensors(path)
    source = build_source(path, record, stored, options, has_optimizer=stored.has_optimizer)
    return replace(
        source, training=_training(source, record, stored, has_model_config=options.model_config is not None)
    )


def read_checked_record(path: Path) -> Record:
    """Return the record of a checkpoint, after checking that all files match the record.

    Raises:
        UserError: a file does not match the record, or the folder's name is not step_N.
    """
    step = parse_step_name(path.resolve().name)
    if step is None:
        raise UserError(str(path), "is a checkpoint, but its folder is not named step_N", "restore its name")
    checkpoints = CheckpointFolder(path.resolve().parent, "give the folder of another step")
    record = checkpoints.read_record(step)
    for name, digest in record.files.items():
        checkpoints.check_file(step, name, digest)
    return record


def build_source(path: Path, record: Record, stored: Tensors, options: SourceOptions, *, has_optimizer: bool) -> Source:
    """Return a checkpoint without the training state.

    Args:
        path: folder of the checkpoint.
        record: record of the checkpoint.
        stored: tensors of the checkpoint.
        options: options given by the user.
        has_optimizer: True if the checkpoint contains the optimizer state.

    Raises:
        UserError: the record lacks fields of the model.
    """
    tokenizer = find_tokenizer(_run_folder(path), options.tokenizer)
    saved = _saved_model(path, record, stored, options, tokenizer.size if tokenizer else None)
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


def _run_folder(path: Path) -> Path:
    """Return the folder of a checkpoint's run."""
    return path.resolve().parents[1]


def _training(source: Source, record: Record, stored: TorchDistTensors, *, has_model_config: bool) -> Training | None:
    """Return the state to resume training from, or None if the checkpoint contains none that can be converted.

    Args:
        source: the checkpoint without training state.
        record: record of the checkpoint.
        stored: tensors of the checkpoint.
        has_model_config: True if the user gave the model's configuration, which then completes an incomplete record.
    """
    from megatron_ext.conversion.megatron.torch_dist import read_optimizer
    from megatron_ext.optim.algorithms.adamw import MOMENTS

    saved, run = source.saved, _run_folder(source.path)
    optimizer = read_optimizer(stored, source.path)
    if optimizer is None or record.model_only:
        return None
    if {key.partition(".")[0] for key in optimizer.tensors.infos()} != {"param", *MOMENTS}:
        return None  # the other formats only support the state of AdamW
    identity = (
        identity_of(saved, record.identity[PRECISION]) if has_model_config and PRECISION in record.identity else {}
    )
    config = read_tree(run / CONFIG) if (run / CONFIG).is_file() else None
    return Training(tensors=stored, optimizer=optimizer, identity={**record.identity, **identity}, config=config)


def _saved_model(
    path: Path, record: Record, stored: Tensors, options: SourceOptions, vocab_size: int | None
) -> SavedModel:
    if options.model_config is None:
        return saved_model(record.identity, str(path / RECORD))
    rows = stored.infos()[VOCABULARY[0]].shape[0]
    return configured_model(options.model_config, rows if vocab_size is None else vocab_size)


def write_run(saved: SavedModel, tensors: Tensors, precision: str, progress: Progress, folder: Path, name: str) -> None:
    """Write a run folder with one checkpoint that contains only the model.

    Args:
        saved: the model.
        tensors: our tensors, without vocabulary padding.
        precision: precision of the run, a key of `PRECISIONS`.
        progress: progress of the training.
        folder: existing folder of the run.
        name: name of the run.

    Raises:
        OSError: writing fails.
    """
    identity = identity_of(saved, precision)
    _write_checkpoint(folder, progress, tensors, None, {"identity": identity, "generators": [], "model_only": True})
    (folder / CONFIG).write_text(_config(saved, precision, folder.parent, name))


def write_training(saved: SavedModel, training: Training, progress: Progress, folder: Path, name: str) -> None:
    """Write a run folder with one checkpoint that `selectron train --resume` can resume.

    It contains no states of random generators, because they are only valid for one parallel layout.

    Args:
        saved: the model, as it was trained.
        training: state of the training.
        progress: progress of the training.
        folder: existing folder of the run.
        name: name of the run.

    Raises:
        OSError: writing fails.
    """
    record_fields = {"identity": training.identity, "generators": []}
    _write_checkpoint(folder, progress, training.tensors, training.optimizer, record_fields)
    if training.config is None:
        text = _config(saved, training.identity[PRECISION], folder.parent, name)
    else:
        section = {**(training.config.get("run") or {}), **_run_fields(folder.parent, name)}
        text = tree_to_yaml({**training.config, "run": section})
    (folder / CONFIG).write_text(text)


def _write_checkpoint(
    folder: Path, progress: Progress, tensors: Tensors, optimizer: OptimizerState | None, record_fields: dict[str, Any]
) -> None:
    from megatron_ext.conversion.megatron.torch_dist import write_torch_dist

    checkpoints = CheckpointFolder(folder / CHECKPOINTS)
    written = write_torch_dist(tensors, checkpoints.create_partial(progress.step), optimizer)
    checkpoints.complete(progress.step, {"progress": progress, **record_fields}, written, Retention())


def _run_fields(runs: Path, name: str) -> dict[str, str]:
    return {"dir": str(runs), "name": name}


def _config(saved: SavedModel, precision: str, runs: Path, name: str) -> str:
    """Return a configuration with the model's values and a placeholder for the data path."""
    tree = {
        "data": {"path": "data", "seq_length": saved.seq_length},
        "model": asdict(saved.model),
        "mixers": {mixer: mixer_fields(config) for mixer, config in saved.mixers.items()},
        "training": {"precision": precision},
        "run": _run_fields(runs, name),
    }
    return tree_to_yaml(tree)
