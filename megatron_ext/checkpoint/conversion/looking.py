"""What a checkpoint's files say of it, read without torch: names, shapes and types of tensors, and the model.

Every file is there, with the content that the record has of it, and the tensors have the names that their model gives
them. Whether they have its shapes, too, only the model itself can tell; see `opening`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from megatron_ext.checkpoint.conversion import hugging_face, selectron_run
from megatron_ext.checkpoint.conversion.families.selectron import Selectron, tensor_names
from megatron_ext.checkpoint.conversion.family import Family, SavedModel
from megatron_ext.checkpoint.conversion.forms import form_of
from megatron_ext.checkpoint.conversion.safetensors_files import SafetensorsTensors
from megatron_ext.checkpoint.conversion.source import Source, SourceOptions
from megatron_ext.checkpoint.conversion.tensors import VOCABULARY, Listed, TensorInfo, Tensors, check_keys, check_shapes
from megatron_ext.checkpoint.conversion.tokenizer_files import kept_tokenizer
from megatron_ext.checkpoint.conversion.torch_dist_index import TorchDistIndex
from megatron_ext.checkpoint.metadata_plain import DTYPES, KINDS, read_plain
from megatron_ext.errors import UserError


def look(path: Path, options: SourceOptions) -> Source | None:
    """Look at a run's folder, a checkpoint of one, or a Hugging Face folder.

    Args:
        path: the folder.
        options: what a user says of it.

    Returns:
        The checkpoint, whose tensors cannot be read. None: it is of another form, or something in it is not as it
        should be, and whoever opens it says what.
    """
    if options.model_config is not None:
        return None
    try:
        form = form_of(path)
        if form in ("run", "step"):
            return _step(selectron_run.newest_step(path) if form == "run" else path, options)
        return _hugging_face(path, options) if form == "hugging_face" else None
    except UserError:
        return None


def _unread(key: str) -> NoReturn:
    raise AssertionError(f"{key}: who only looks at a checkpoint reads no tensor")


def _step(path: Path, options: SourceOptions) -> Source | None:
    record = selectron_run.checked_record(path)
    index = TorchDistIndex(path, read_plain(path), KINDS.tensor)
    stored = Listed(index.infos, _unread)
    source = selectron_run.source_of(path, record, stored, options, has_optimizer=index.has_optimizer)
    if Selectron().why_not(source.saved) is not None:
        return None  # a mixer whose parameters nobody here can name
    infos = source.tensors.infos()
    check_keys(tensor_names(source.saved), infos, str(path))
    _check_vocabulary(source.saved, infos[VOCABULARY[0]], str(path))
    return source


def _hugging_face(path: Path, options: SourceOptions) -> Source:
    family, saved = hugging_face.read_model(path)
    stored = SafetensorsTensors(path, DTYPES.__getitem__)
    return Source(
        path=path,
        format="hugging_face",
        saved=saved,
        stored=stored,
        tensors=_counted(family, saved, stored, str(path)),
        tokenizer=kept_tokenizer(path, options.tokenizer),
        family=family,
    )


def _counted(family: Family, saved: SavedModel, stored: Tensors, where: str) -> Tensors:
    """Our tensors as far as theirs tell: a rule's are as many numbers as theirs, and their shape is left open."""
    infos, rules = stored.infos(), list(family.rules(saved))
    check_keys([key for rule in rules for key in rule.theirs], infos, where)
    found: dict[str, TensorInfo] = {}
    for rule in rules:
        parts = [infos[key] for key in rule.theirs if key not in rule.neutral]
        found[" + ".join(rule.ours)] = TensorInfo((sum(part.num_elements for part in parts),), parts[0].dtype)
        if VOCABULARY[0] in rule.ours:
            _check_vocabulary(saved, parts[0], where)
    return Listed(found, _unread)


def _check_vocabulary(saved: SavedModel, info: TensorInfo, where: str) -> None:
    expected = TensorInfo((saved.vocab_size, saved.model.hidden_size), info.dtype)
    check_shapes({VOCABULARY[0]: expected}, {VOCABULARY[0]: info}, where)
