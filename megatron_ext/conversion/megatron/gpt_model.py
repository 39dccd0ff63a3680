"""Logits of megatron-core's `GPTModel` with its own attention."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.core.float64 import in_float64
from megatron_ext.conversion.core.saved_model import shape_of
from megatron_ext.conversion.core.staged import last_positions_only, on_meta, read_on_use
from megatron_ext.conversion.core.tensors import Tensors
from megatron_ext.conversion.core.tolerance import MAX_POSITIONS
from megatron_ext.model.build import transformer_config
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform.device import select_platform

_POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
_OUR_NAMES = {"linear_qkv": "in_proj", "linear_proj": "out_proj"}


def logits(saved: SavedModel, tensors: Tensors, tokens_bt: Tensor) -> Tensor:
    """Compute the logits of `GPTModel` in float64.

    Args:
        saved: the model, whose layers are all attention.
        tensors: its weights by our keys.
        tokens_bt: int64 [b, t].

    Returns:
        float64 logits [b, k, v] of the last k tokens, at most `MAX_POSITIONS`.
    """

    def read(name: str) -> Tensor:
        for theirs, ours in _OUR_NAMES.items():
            name = name.replace(f"self_attention.{theirs}.", f"self_attention.{ours}.")
        return tensors.read(name)

    t = tokens_bt.shape[1]
    mask_tt = torch.ones(t, t, dtype=torch.bool).triu(1)[None, None]
    platform = select_platform("cpu")
    with groups_of_one_process(platform.communication) as groups, torch.no_grad():
        with on_meta():
            model = GPTModel(
                config=transformer_config(shape_of(saved), platform),
                transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
                vocab_size=saved.vocab_size,
                max_sequence_length=saved.model.max_position_embeddings,
                share_embeddings_and_output_weights=saved.model.tie_embeddings,
                position_embedding_type=_POSITIONS[saved.mixers["attention"].position_encoding],
                rotary_base=saved.model.rotary_base,
                pg_collection=groups,
            )
        with read_on_use(model.eval(), read), in_float64(), last_positions_only(model.output_layer, MAX_POSITIONS, 0):
            positions_bt = torch.arange(t).expand_as(tokens_bt)
            logits_btv: Tensor = model(tokens_bt, positions_bt, attention_mask=mask_tt)
    return logits_btv
