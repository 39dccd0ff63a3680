"""Stand-alone mixer in one process, for diagnosis and benchmarks."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_ext.config.schema import ModelConfig, ParallelConfig
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.build import transformer_config
from megatron_ext.model.shape import ModelShape
from megatron_ext.model.specs import mixer_spec
from megatron_ext.parallel.parameters import initialize_mixer
from megatron_ext.platform.device import Platform


def lone_mixer_shape(
    name: str, *, hidden_size: int, heads: int, head_dim: int, length: int, groups: int | None = None
) -> ModelShape:
    """Return the shape of a one-layer model with the named mixer's default settings, in bf16, with the local back-end.

    Args:
        name: name of the mixer.
        hidden_size: width of the hidden states.
        heads: number of query heads.
        head_dim: width of a head.
        length: maximum number of tokens of a sequence.
        groups: number of query groups; None: as many as heads.
    """
    return ModelShape(
        model=ModelConfig(
            pattern=name,
            hidden_size=hidden_size,
            num_attention_heads=heads,
            num_query_groups=groups or heads,
            head_dim=head_dim,
            ffn_hidden_size=hidden_size,
            max_position_embeddings=length,
        ),
        mixers=[name],
        mixer_configs={name: load_all()[name].config_type()},
        parallel=ParallelConfig(),
        vocab_size=1,
        precision="bf16",
        recompute="none",
        backend="local",
    )


def build_lone_mixer(shape: ModelShape, platform: Platform, groups: ProcessGroupCollection, seed: int) -> Mixer:
    """Build the mixer of a one-layer model on the platform's device, initialised as in training.

    Args:
        shape: see `lone_mixer_shape`.
        platform: device and communication back-end.
        groups: process groups of this process alone.
        seed: seed of the weights.
    """
    (name,) = shape.mixers
    spec = mixer_spec(name, shape.mixer_configs[name], shape.backend)
    config = transformer_config(shape, platform)
    mixer: Mixer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    initialize_mixer(mixer, seed, groups.tp)
    return mixer.to(platform.device)
