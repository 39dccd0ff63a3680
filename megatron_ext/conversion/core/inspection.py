"""Inspection of a checkpoint without torch: the model, and the names, shapes and dtypes of its tensors.

The files are compared with the checkpoint's record, and the tensor names with those of the model. The shapes of all
tensors are checked only by `opening`, which builds the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from megatron_ext.checkpoint.metadata_plain import DTYPES, KINDS, read_plain
from megatron_ext.conversion.core import selectron_run
from megatron_ext.conversion.core.family import Family, SavedModel
from megatron_ext.conversion.core.formats import form_of
from megatron_ext.conversion.core.source import Source, SourceOptions
from megatron_ext.conversion.core.tensors import VOCABULARY, Listed, TensorInfo, Tensors, check_keys, check_shapes
from megatron_ext.conversion.huggingface import folder as hugging_face
from megatron_ext.conversion.huggingface.families.selectron import Selectron, tensor_names
from megatron_ext.conversion.huggingface.safetensors_files import SafetensorsTensors
from megatron_ext.conversion.megatron.torch_dist_index import TorchDistIndex
from megatron_ext.runs.tokenizer_files import find_tokenizer
from megatron_ext.utils.errors import UserError


def look(path: Path, options: SourceOptions) -> Source | None:
    """Inspect the folder of a run, one checkpoint of a run, or a Hugging Face folder.

    Args:
        path: the folder.
        options: information from the user.

    Returns:
        The checkpoint, whose tensors cannot be read. None: it has another format or is invalid. `open_source` then
        gives the reason.
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
        return None  # a mixer whose parameter names are not known
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
        tokenizer=find_tokenizer(path, options.tokenizer),
        family=family,
    )


def _counted(family: Family, saved: SavedModel, stored: Tensors, where: str) -> Tensors:
    """Return descriptions of our tensors as far as those of the family determine them.

    The tensors of a rule are one entry with their total number of elements, because their shapes are not known.
    """
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
