"""Construction of this rank's model chunks from the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import activations
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_ext.config.schema import FP8_TILE, TransportName
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.model.output_layer import LanguageModel
from megatron_ext.model.shape import ModelShape
from megatron_ext.model.specs import layer_specs, provider
from megatron_ext.parallel.parameters import initialize_model
from megatron_ext.platform.device import DTYPES, Platform
from megatron_ext.utils.errors import UserError


@dataclass
class MixerTransformerConfig(TransformerConfig):
    """Megatron's transformer configuration with the additional fields of our mixers.

    Attributes:
        rotary_base: base of the rotary frequencies, which mixers apply themselves.
        context_exchange: exchange between context-parallel ranks; see `ParallelConfig`.
        context_exchange_rounds: number of messages in which heads are exchanged.
        context_transport: transport of those messages.
        branches_per_layer: number of additions to the residual stream per layer.
        recompute_feed_forward: see `BlockLayer`.
    """

    rotary_base: float = 10000.0
    context_exchange: str = "auto"
    context_exchange_rounds: int = 1
    context_transport: TransportName = "nccl"
    branches_per_layer: int = 2
    recompute_feed_forward: bool = False


def transformer_config(shape: ModelShape, platform: Platform) -> MixerTransformerConfig:
    """Return Megatron's configuration: norm, SwiGLU or squared ReLU, no biases of matrices, no dropout."""
    model, parallel, dtype = shape.model, shape.parallel, DTYPES[shape.precision]
    assert parallel.sequence != "auto" or parallel.tensor == 1, "resolved by model_shape"
    interleaved, swiglu = parallel.virtual_pipeline > 1, model.block == "transformer"
    batched = parallel.batch_p2p_comm
    if batched is None:
        batched = not interleaved and platform.is_cuda
    return MixerTransformerConfig(
        num_layers=len(shape.mixers),
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        rotary_base=model.rotary_base,
        normalization="RMSNorm" if model.normalization == "rms_norm" else "LayerNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else activations.squared_relu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=model.init_std,
        # Megatron's initialisation must run, as it marks tensor-parallel weights. initialize_model sets the values.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        use_cpu_initialization=not platform.is_cuda,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence is True,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        context_parallel_size=parallel.context,
        context_exchange=parallel.context_exchange,
        context_exchange_rounds=parallel.context_exchange_rounds,
        context_transport=parallel.context_transport,
        branches_per_layer=1 if model.block == "mixer" else 2,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        batch_p2p_comm=batched,
        batch_p2p_sync=False,
        overlap_p2p_comm=interleaved and not batched,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        # One compiled kernel for SwiGLU, which saves only its input; compilation does not pay off on a CPU.
        bias_activation_fusion=swiglu and platform.is_cuda,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hetereogenous_dist_checkpoint=True,  # layers of different mixers have different parameters
        **_recompute(shape),
        **_fp8(shape),
    )


def _recompute(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of the transformer configuration that control recomputation."""
    if shape.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_feed_forward": shape.recompute == "mlp"}


def _fp8(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of the transformer configuration that control FP8 matrix products.

    Only Megatron's recipes with scales from current values are used, so that there is no scaling history to checkpoint.
    """
    formats = {"tensorwise": "hybrid", "blockwise": "e4m3"}
    return {} if shape.fp8 == "none" else {"fp8": formats[shape.fp8], "fp8_recipe": shape.fp8}


def _leave_as_is(_: torch.Tensor) -> None:
    """Leave the weight uninitialised."""


def build_model(
    shape: ModelShape, platform: Platform, groups: ProcessGroupCollection, seed: int | None
) -> list[MegatronModule]:
    """Build the model chunks of this rank on the platform's device, initialised.

    Args:
        shape: inputs of the construction.
        platform: device and communication back-end.
        groups: process groups.
        seed: seed of the initial weights; None: leave the weights uninitialised, to be loaded.

    Returns:
        One `LanguageModel` per virtual pipeline stage, wrapped in `Float16Module` if the precision is bf16. A chunk
        maps tokens [b, t] and labels [b, t] to losses [b, t] on the last stage, and to hidden states [t, b, hidden]
        elsewhere.

    Raises:
        UserError: FP8 is requested and a matrix has a size that FP8 products do not support.
    """
    config = transformer_config(shape, platform)
    with platform.optimizer_context():
        chunks = [_build_chunk(shape, config, groups, stage) for stage in range(shape.parallel.virtual_pipeline)]
    if config.fp8:
        from transformer_engine.pytorch import Linear

        named = (named for chunk in chunks for named in chunk.named_modules())
        check_tiles((name, module.weight) for name, module in named if isinstance(module, Linear))
    if seed is not None:
        initialize_model(chunks, seed, groups.tp)
    if platform.is_cuda:
        chunks = [chunk.to(platform.device) for chunk in chunks]
    if config.bf16:
        return [Float16Module(config, chunk) for chunk in chunks]
    return chunks


def check_tiles(linears: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that the sides of FP8 matrices, after tensor-parallel sharding, are multiples of 16.

    Args:
        linears: (name, weight [outputs, inputs]) of each linear layer with FP8 products.

    Raises:
        UserError: a side is not a multiple of 16.
    """
    for name, weight in linears:
        outputs, inputs = weight.shape
        if outputs % FP8_TILE or inputs % FP8_TILE:
            raise UserError(
                "training.fp8",
                f"{name} has {outputs} x {inputs} weights a rank, and products in 8 bits take multiples of {FP8_TILE}",
                "set training.fp8=none, or change the sizes of heads or feed-forward, or parallel.tensor",
            )


def _build_chunk(
    shape: ModelShape, config: MixerTransformerConfig, groups: ProcessGroupCollection, stage: int
) -> LanguageModel:
    pp_rank, last = groups.pp.rank(), groups.pp.size() - 1
    vp_stage = stage if shape.parallel.virtual_pipeline > 1 else None
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    own = shape.mixers[first : first + get_num_layers_to_build(config, vp_stage, pp_rank)]
    block = TransformerBlockSubmodules(
        layer_specs=layer_specs(own, shape.mixer_configs, shape.backend, shape.model.block, shape.model.normalization),
        layer_norm=provider(shape.backend).layer_norm(rms_norm=shape.model.normalization == "rms_norm"),
    )
    chunk = LanguageModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=shape.padded_vocab_size,
        num_tokens=shape.vocab_size,
        max_sequence_length=shape.model.max_position_embeddings,
        pre_process=pp_rank == 0 and stage == 0,
        post_process=pp_rank == last and stage == shape.parallel.virtual_pipeline - 1,
        share_embeddings_and_output_weights=shape.model.tie_embeddings,
        position_embedding_type="learned_absolute" if shape.learns_positions else "none",
        vp_stage=vp_stage,
        pg_collection=groups,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk


def packed_flops_per_token(shape: ModelShape, chunks: Sequence[torch.nn.Module], lengths: Mapping[int, int]) -> float:
    """Compute `training_flops_per_token` for packed documents that are kept apart.

    Args:
        shape: shape of the model.
        chunks: chunks of the model.
        lengths: number of documents, or pieces of documents, by length.
    """
    tokens = sum(length * count for length, count in lengths.items())
    costs = (count * length * training_flops_per_token(shape, chunks, length) for length, count in lengths.items())
    return sum(costs) / tokens


def training_flops_per_token(shape: ModelShape, chunks: Sequence[torch.nn.Module], seq_length: int) -> float:
    """Compute model FLOPs per token of forward and backward pass, for these chunks' layers and output layer.

    Follows `Mixer.training_flops`. The embedding is a look-up and not counted.
    """
    total = 0.0
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Mixer):
                total += module.training_flops(seq_length) + 6 * shape.feed_forward_parameters
            elif isinstance(module, LanguageModel) and module.post_process:
                total += 6 * shape.model.hidden_size * shape.padded_vocab_size
    return total
