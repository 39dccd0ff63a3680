"""Softmax attention (Transformer++) and the study's ablations of it (arXiv 2505.18522)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.softmax_attention import alibi_slopes, softmax_attention
from megatron_ext.mixers.core.base import MixInput
from megatron_ext.mixers.core.key_value import KeyValueMixer, keys_in_window
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import AttentionConfig
from megatron_ext.parallel.parameters import generator_for


@register("attention")
class SoftmaxAttention(KeyValueMixer):
    """Multi-head softmax attention with grouped queries."""

    mixer_config: AttentionConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._frozen_keys: dict[tuple[int, int], Tensor] = {}

    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, part: MixInput) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        factors = self.mixer_config
        slopes = None
        if factors.position_encoding == "alibi":
            first = part.first_head_group * self.queries_per_group
            slopes = alibi_slopes(self.config.num_attention_heads)[first : first + q_bthd.shape[2]].to(q_bthd.device)
        return softmax_attention(
            q_bthd,
            k_bshd,
            v_bshd,
            scale=self.head_dim**-0.5 / factors.temperature,
            window=factors.window,
            alibi_slopes=slopes,
            query_offset=query_offset,
        )

    @property
    def window(self) -> int | None:
        """Implement `KeyValueMixer.window`."""
        return self.mixer_config.window

    @property
    def projects_keys(self) -> bool:
        """False if keys are frozen random vectors."""
        return not self.mixer_config.random_keys

    def frozen_keys(self, v_bshd: Tensor, first_position: int, part: MixInput) -> Tensor:
        """Return frozen keys [b, s, groups, d].

        They are a function of seed, layer, global group and position only, so they are identical in every layout.
        """
        b, s, groups, d = v_bshd.shape
        head_groups, end = (part.first_head_group, groups), first_position + s
        if head_groups not in self._frozen_keys or len(self._frozen_keys[head_groups]) < end:
            # Rounded up to a power of two, so that decoding token by token seldom draws new ones.
            count = 1 << (end - 1).bit_length()
            keys = [
                _random_vectors(
                    count, d, (self.mixer_config.random_keys_seed, self.layer_number, part.first_head_group + i)
                )
                for i in range(groups)
            ]
            self._frozen_keys[head_groups] = torch.stack(keys, 1).to(v_bshd)
        return self._frozen_keys[head_groups][first_position:end].expand(b, -1, -1, -1)

    def mixing_flops(self, seq_length: int) -> float:
        """Count scores and weighted values over the mean number of keys per query."""
        seen = keys_in_window(self.mixer_config.window, seq_length)
        return 4 * self.config.num_attention_heads * self.head_dim * seen


def _random_vectors(count: int, width: int, identity: tuple[int, ...]) -> Tensor:
    """Return standard normal fp32 vectors [count, width] on the CPU; vector i is a function of `identity` and i."""
    # torch draws in blocks of 16 numbers, and differently if the last block is incomplete.
    return torch.randn(-(-count // 16) * 16, width, generator=generator_for(*identity))[:count]
