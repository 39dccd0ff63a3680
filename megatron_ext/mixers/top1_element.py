"""Top-1 Element: each query returns the value whose key has the highest score (arXiv 2505.18522)."""

from __future__ import annotations

from torch import Tensor

from kernels.top1_element import top1_element_attention
from megatron_ext.mixers.core.base import MixInput
from megatron_ext.mixers.core.key_value import KeyValueMixer
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import Top1ElementConfig


@register("top1_element")
class Top1Element(KeyValueMixer):
    """Top-1 Element attention with grouped queries."""

    mixer_config: Top1ElementConfig

    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, part: MixInput) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        out, _ = top1_element_attention(
            q_bthd, k_bshd, v_bshd, estimator=self.mixer_config.estimator, query_offset=query_offset
        )
        return out

    def mixing_flops(self, seq_length: int) -> float:
        """Count the scores over all keys up to a query; the value is only copied."""
        return self.config.num_attention_heads * self.head_dim * (seq_length + 1)
