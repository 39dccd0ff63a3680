"""What each mixer would use on this machine, found out by running it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer.spec_utils import build_module

from kernels.dispatch import Choice, recorded_choices
from megatron_ext.config.schema import ModelConfig, ParallelConfig
from megatron_ext.mixers.registry import MixerEntry, load_all
from megatron_ext.model import ModelShape, transformer_config
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform import DTYPES, Platform
from megatron_ext.specs import mixer_spec

LENGTH, HIDDEN, HEADS, PRECISION = 256, 128, 2, "bf16"


def implementations(platform: Platform) -> Iterator[tuple[str, list[tuple[str, Choice]]]]:
    """Each mixer with its default settings, and which implementation each of its ops took and why.

    In bf16, two heads of 64, 256 tokens, in a process group of this process alone.
    """
    with groups_of_one_process(platform.communication) as groups:
        for name, entry in sorted(load_all().items()):
            yield name, _choices(entry, platform, groups)


@torch.no_grad()
def _choices(entry: MixerEntry, platform: Platform, groups: object) -> list[tuple[str, Choice]]:
    shape = ModelShape(
        model=ModelConfig(
            pattern=entry.name,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=HEADS,
            head_dim=HIDDEN // HEADS,
            ffn_hidden_size=HIDDEN,
            max_position_embeddings=LENGTH,
        ),
        mixers=[entry.name],
        mixer_configs={entry.name: entry.config_type()},
        parallel=ParallelConfig(),
        vocab_size=1,
        precision=PRECISION,
        recompute="none",
        backend="local",
    )
    spec = mixer_spec(entry.name, shape.mixer_configs[entry.name], shape.backend)
    mixer = build_module(spec, config=transformer_config(shape, platform), layer_number=1, pg_collection=groups)
    mixer.to(platform.device)
    for parameter in mixer.parameters():
        parameter.zero_()
    with recorded_choices() as found:
        mixer(torch.zeros(LENGTH, 1, HIDDEN, dtype=DTYPES[PRECISION], device=platform.device))
    return found
