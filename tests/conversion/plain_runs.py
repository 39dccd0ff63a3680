"""Functions run by each rank to save a plain GPTModel of megatron-core, as Megatron-LM does."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform.device import select_platform

VOCABULARY, ROWS, LENGTH = 120, 128, 32
ARGUMENTS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 96,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "position_embedding_type": "rope",
    "rotary_base": 5000,
    "norm_epsilon": 1e-5,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": ROWS,
    "iteration": 7,
    "consumed_train_samples": 56,
    "params_dtype": torch.float32,
    "attention_backend": AttnBackend.local,
}


def save(
    rank: int, world_size: int, folder: Path, tensor: int, pipeline: int, stacked: bool, extra: dict[str, Any]
) -> Tensor | None:
    """Save a model with random weights. In one process, return its logits for `tokens`."""
    select_platform("cpu")
    groups = make_process_groups(ParallelConfig(tensor=tensor, pipeline=pipeline), 1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=96,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hetereogenous_dist_checkpoint=not stacked,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=ROWS,
        max_sequence_length=LENGTH,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == pipeline - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=5000,
        pg_collection=groups,
    ).eval()
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"model": model.sharded_state_dict(), "checkpoint_version": 3.0, **extra}
    dist_checkpointing.save(state, str(folder))
    if world_size > 1:
        return None
    with torch.no_grad():
        mask_tt = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        positions_bt = torch.arange(LENGTH).expand(2, -1)
        logits_btv: Tensor = model(tokens(), positions_bt, attention_mask=mask_tt)
    return logits_btv[..., :VOCABULARY]


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def arguments(**changed: Any) -> dict[str, Any]:
    """Return the arguments as Megatron-LM saves them in a checkpoint."""
    return {"args": Namespace(**{**ARGUMENTS, **changed}), "iteration": 7}
