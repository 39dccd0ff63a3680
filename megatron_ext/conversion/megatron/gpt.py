"""Reader of megatron-core's `GPTModel` checkpoints (dist_checkpointing), of Megatron-LM or another trainer."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.common_state import read_common_state
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.pickle_names import AllowedNames, argparse_namespace, ignored_class
from megatron_ext.config.schema import ModelConfig
from megatron_ext.config.validate import validate
from megatron_ext.conversion.core.converted_tensors import ConvertedTensors, Step
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.core.formats import MEGATRON_LATEST
from megatron_ext.conversion.core.saved_model import configured_model
from megatron_ext.conversion.core.source import Source, SourceOptions
from megatron_ext.conversion.core.tensors import VOCABULARY, Tensors, without_padding
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.megatron.torch_dist import TorchDistTensors
from megatron_ext.mixers.core.settings import AttentionConfig
from megatron_ext.runs.tokenizer_files import StoredTokenizer, find_tokenizer, read_pointer
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import path_within

MAX_DIGITS = 18
"""Maximum number of digits of an iteration. Python refuses to parse integers of some thousand digits."""

NEWEST = MEGATRON_LATEST

_RENAMED = {
    "self_attention.linear_qkv.weight": "self_attention.in_proj.weight",  # the row order is identical
    "self_attention.linear_proj.weight": "self_attention.out_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"^(decoder\.layers\.\d+\.)(.*)$")
_POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}

# Arguments of Megatron-LM for which our model supports only one value. The value is also the default.
_FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "num_experts": None,
    "multi_latent_attention": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False,
    "window_size": None,
}

_DEFAULTS: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "group_query_attention": False,
    "kv_channels": None,
    "max_position_embeddings": None,
    "rotary_base": 10000,
    "norm_epsilon": 1e-5,
    "init_method_std": 0.02,
    "vocab_size": None,
}
"""Defaults for arguments that a checkpoint of Megatron-LM does not contain."""

_MEGATRON_CLASSES = {
    "enums": ("ModelType",),
    "transformer.enums": (
        *("AttnBackend", "AttnMaskType", "AttnType", "CudaGraphScope", "LayerType", "ModelType"),
        *("CudaGraphModule", "InferenceCudaGraphScope"),  # since 0.18
    ),
    "optimizer.optimizer_config": ("OptimizerConfig",),
    "rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
}

_NAMES: AllowedNames = {
    ("argparse", "Namespace"): argparse_namespace(),
    ("types", "SimpleNamespace"): ignored_class(),
    ("signal", "Signals"): ignored_class(),
    **{
        (f"numpy.{core}.multiarray", kind): ignored_class()
        for core in ("core", "_core")
        for kind in ("_reconstruct", "scalar")
    },
    **{("numpy", kind): ignored_class() for kind in ("ndarray", "dtype")},
    **{("pathlib", kind): ignored_class() for kind in ("PosixPath", "WindowsPath")},
    **{
        (f"megatron.core.{module}", kind): ignored_class()
        for module, kinds in _MEGATRON_CLASSES.items()
        for kind in kinds
    },
}
"""Classes that Megatron-LM pickles in the common state. The contents of most of them are not read."""


def open_folder(path: Path, options: SourceOptions) -> Source:
    """Open the model of a checkpoint, or of the newest checkpoint in Megatron-LM's `--save` folder.

    Raises:
        UserError: the checkpoint is damaged, lacks the model's sizes, or contains a model that ours cannot express.
    """
    path = _newest(path) if (path / NEWEST).is_file() else path
    stored = TorchDistTensors(path)
    if VOCABULARY[0] not in stored.infos():
        problem = f"contains no {VOCABULARY[0]}, so it is not a GPTModel of megatron-core"
        raise UserError(str(path), problem, "give a checkpoint of a GPTModel")
    tokenizer = find_tokenizer(path, options.tokenizer)
    args = None if options.model_config is not None else _arguments(path)
    saved = _saved_model(path, args, options, stored, tokenizer)
    return Source(
        path=path,
        format="megatron_core",
        saved=saved,
        stored=stored,
        tensors=without_padding(ConvertedTensors(stored, list(_steps(stored)), str(path)), saved.vocab_size),
        tokenizer=tokenizer,
        progress=None if args is None else _progress(args),
        has_optimizer=stored.has_optimizer,
    )


def _newest(path: Path) -> Path:
    iteration = read_pointer(path / NEWEST)
    is_number = iteration.isascii() and iteration.isdecimal() and len(iteration) <= MAX_DIGITS
    name = f"iter_{int(iteration):07d}" if is_number else iteration
    folder = path_within(path, name, str(path / NEWEST), follow_links=True)
    if not folder.is_dir():
        raise UserError(
            str(path / NEWEST), f"names {iteration}, but {folder} does not exist", "copy the whole checkpoint again"
        )
    return folder


def _arguments(path: Path) -> Namespace:
    """Return Megatron-LM's arguments, which its checkpoints contain."""
    hint = "give the model's sizes in a YAML file with --model-config (its `model` section)"
    try:
        file, common = read_common_state(path, _NAMES)
    except UserError as error:
        raise UserError(error.where, error.problem, hint) from error
    args = common.get("args") if isinstance(common, dict) else None
    if not isinstance(args, Namespace):
        problem = "contains no args, and the tensors do not give the number of heads, query groups and the rotary base"
        raise UserError(str(file), problem, hint)
    return args


def _saved_model(
    path: Path, args: Namespace | None, options: SourceOptions, stored: Tensors, tokenizer: StoredTokenizer | None
) -> SavedModel:
    rows = stored.infos()[VOCABULARY[0]].shape[0]
    if options.model_config is not None:
        return configured_model(options.model_config, rows if tokenizer is None else tokenizer.size)
    assert args is not None
    fields = Fields(vars(args), _DEFAULTS | _FIXED, prefix="args.", hint="give the model's sizes with --model-config")
    if tokenizer is not None:
        return _model_of_arguments(fields, tokenizer.size)
    return _model_of_arguments(fields, fields.positive_int_or("vocab_size", rows))


def _model_of_arguments(fields: Fields, vocab_size: int) -> SavedModel:
    for name, value in _FIXED.items():
        fields.require(name, value)
    fields.require("position_embedding_type", *_POSITIONS)
    position_embedding, layers, length = (
        fields["position_embedding_type"],
        fields.layers("num_layers"),
        fields.positive_int("seq_length"),
    )
    model = {
        "pattern": f"attention*{layers}",
        "hidden_size": fields.positive_int("hidden_size"),
        **_heads(fields),
        "ffn_hidden_size": fields.positive_int("ffn_hidden_size"),
        "max_position_embeddings": fields.positive_int_or("max_position_embeddings", length),
        "tie_embeddings": not fields.flag("untie_embeddings_and_output_weights"),
        "rotary_base": fields.positive_number("rotary_base"),
        "norm_epsilon": fields.positive_number("norm_epsilon"),
        "init_std": fields.positive_number("init_method_std"),
    }
    return SavedModel(
        model=validate(ModelConfig, model, "args."),
        layers=("attention",) * layers,
        mixers={"attention": AttentionConfig(position_encoding=_POSITIONS[position_embedding])},  # type: ignore[arg-type]
        vocab_size=vocab_size,
        seq_length=length,
    )


def _heads(fields: Fields) -> dict[str, int]:
    groups = "num_query_groups" if fields.flag("group_query_attention") else "num_attention_heads"
    return fields.heads("num_attention_heads", groups, "kv_channels")


def _steps(stored: Tensors) -> Iterator[Step]:
    for key in stored.infos():
        layer = _LAYER.match(key)
        our_key = key if layer is None else layer[1] + _RENAMED.get(layer[2], layer[2])
        yield Step((key,), (our_key,), list)


def _progress(args: Namespace) -> Progress:
    fields = Fields(vars(args), {"consumed_train_samples": None, "iteration": None}, prefix="args.")
    samples, step = (
        0 if not fields[name] else fields.positive_int(name) for name in ("consumed_train_samples", "iteration")
    )
    return Progress(step=step, samples=samples, tokens=samples * args.seq_length)
