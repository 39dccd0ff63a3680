"""Inspection of a checkpoint without torch: the model, and the names, shapes and dtypes of its tensors.

The files are compared with the checkpoint's record, and the tensor names with those of the model. The shapes of all
tensors are checked only by `opening`, which builds the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from megatron_ext.checkpoint.metadata_plain import CLASSES, DTYPES, read_plain
from megatron_ext.conversion.core import selectron_run
from megatron_ext.conversion.core.family import Family, SavedModel
from megatron_ext.conversion.core.formats import detect_format
from megatron_ext.conversion.core.source import Source, SourceOptions
from megatron_ext.conversion.core.tensors import VOCABULARY, LazyTensors, TensorInfo, Tensors, check_keys, check_shapes
from megatron_ext.conversion.huggingface import folder as hugging_face
from megatron_ext.conversion.huggingface.families.selectron import Selectron, tensor_names
from megatron_ext.conversion.huggingface.safetensors_files import SafetensorsTensors
from megatron_ext.conversion.megatron.torch_dist_index import TorchDistIndex
from megatron_ext.runs.tokenizer_files import find_tokenizer
from megatron_ext.utils.errors import UserError


def inspect_folder(path: Path, options: SourceOptions) -> Source | None:
    """Describe the folder of a run, one checkpoint of a run, or a Hugging Face folder without importing torch.

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
        folder_format = detect_format(path)
        if folder_format in ("run", "step"):
            return _inspect_step(selectron_run.newest_step(path) if folder_format == "run" else path, options)
        return _inspect_hugging_face(path, options) if folder_format == "hugging_face" else None
    except UserError:
        return None


def _refuse_to_read(key: str) -> NoReturn:
    raise AssertionError(f"{key}: an inspection reads no tensor")


def _inspect_step(path: Path, options: SourceOptions) -> Source | None:
    record = selectron_run.read_checked_record(path)
    index = TorchDistIndex(path, read_plain(path), CLASSES.tensor)
    stored = LazyTensors(index.infos, _refuse_to_read)
    source = selectron_run.build_source(path, record, stored, options, has_optimizer=index.has_optimizer)
    if Selectron().unsupported_reason(source.saved) is not None:
        return None  # the parameter names of a mixer are unknown
    infos = source.tensors.infos()
    check_keys(tensor_names(source.saved), infos, str(path))
    _check_vocabulary(source.saved, infos[VOCABULARY[0]], str(path))
    return source


def _inspect_hugging_face(path: Path, options: SourceOptions) -> Source:
    family, saved = hugging_face.read_model(path)
    stored = SafetensorsTensors(path, DTYPES.__getitem__)
    return Source(
        path=path,
        format="hugging_face",
        saved=saved,
        stored=stored,
        tensors=_summarize_tensors(family, saved, stored, str(path)),
        tokenizer=find_tokenizer(path, options.tokenizer),
        family=family,
    )


def _summarize_tensors(family: Family, saved: SavedModel, stored: Tensors, where: str) -> Tensors:
    """Return one entry per rule with the total number of elements of our tensors.

    The shapes of the single tensors are unknown, because the rules need torch.
    """
    infos, rules = stored.infos(), list(family.rules(saved))
    check_keys([key for rule in rules for key in rule.theirs], infos, where)
    summaries: dict[str, TensorInfo] = {}
    for rule in rules:
        sources = [infos[key] for key in rule.theirs if key not in rule.neutral]
        num_elements = sum(source.num_elements for source in sources)
        summaries[" + ".join(rule.ours)] = TensorInfo((num_elements,), sources[0].dtype)
        if VOCABULARY[0] in rule.ours:
            _check_vocabulary(saved, sources[0], where)
    return LazyTensors(summaries, _refuse_to_read)


def _check_vocabulary(saved: SavedModel, info: TensorInfo, where: str) -> None:
    expected = TensorInfo((saved.vocab_size, saved.model.hidden_size), info.dtype)
    check_shapes({VOCABULARY[0]: expected}, {VOCABULARY[0]: info}, where)
