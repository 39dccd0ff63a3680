"""GLA: linear attention with a decay per key feature (Yang, Wang, Shen, Panda, Kim 2023, arXiv 2312.06635)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import cut, fused
from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.mixers.core.base import MixInput, batch_first
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import GLAConfig
from megatron_ext.mixers.core.stateful import StatefulMixer, scan
from megatron_ext.parallel.parameters import new_parameter, normal, zeros


@register("gla")
class GLA(StatefulMixer):
    """Gated linear attention; see `StatefulMixer` for the rows of its projection.

    A token has one decay per key feature of each head: sigmoid(up(down(hidden)) + bias)^(1 / temperature). All heads
    share `down`.
    """

    mixer_config: GLAConfig

    def add_parameters(self) -> None:
        """Create the low-rank projection to the decays, and its bias."""
        rank, start = self.mixer_config.decay_rank, normal(self.config.init_method_std)
        self.decay_down = new_parameter((rank, self.config.hidden_size), start, dtype=self.config.params_dtype)
        self.decay_up = self.new_parameter_of_head_groups(start, self.head_dim, rank)
        self.decay_bias = self.new_parameter_of_head_groups(zeros, self.head_dim, in_fp32=True)

    def shared_features(self, hidden_states: Tensor) -> Tensor:
        """Implement `Mixer.shared_features`: the low-rank projection `down` of the decays."""
        return self.project_for_all_head_groups(hidden_states, self.decay_down)

    def read_states(self, x_tbuw: Tensor, part: MixInput) -> tuple[Tensor, Tensor]:
        """Implement `StatefulMixer.read_states`: scan with a decay per key feature."""
        assert part.shared is not None
        up, bias = (self.own_head_groups(p, part) for p in (self.decay_up, self.decay_bias))
        logits = F.linear(part.shared, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
        temperature = self.mixer_config.decay_temperature
        q, k, v, gate, decay = split_with_log_decay(x_tbuw, logits, bias, temperature, self.head_widths)
        return scan(gated_linear_attention, q, k, v, decay, part=part), gate


@fused
def split_with_log_decay(
    x_tbuw: Tensor, logits_tbud: Tensor, bias_ud: Tensor, temperature: float, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """Split the rows, and compute the log decays (<= 0, fp32): [b, t, u, width] each."""
    decay = F.logsigmoid(logits_tbud.float() + bias_ud.float()) / temperature
    return tuple(batch_first(x).contiguous() for x in (*cut(x_tbuw, widths), decay))
