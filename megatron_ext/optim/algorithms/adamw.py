"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.algorithm import Algorithm
from megatron_ext.optim.registry import register
from megatron_ext.platform import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


@register("adamw")
class AdamW(Algorithm):
    """AdamW of torch, or under Megatron the implementation that Megatron selects (Transformer Engine's on a GPU)."""

    moments = MOMENTS
    shardings = (*Algorithm.shardings, "megatron")

    def build(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> adamw.AdamW:
        """Implement `Algorithm.build` with torch's fused kernel."""
        beta1, beta2 = config.betas
        return adamw.AdamW(
            groups,
            lr=config.lr,
            betas=(beta1, beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Implement `Algorithm.init_state`, with torch's step count."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **super().init_state(parameter)}

    def megatron_fields(self, config: OptimizerConfig) -> dict[str, Any]:
        """Implement `Algorithm.megatron_fields`."""
        beta1, beta2 = config.betas
        return {"optimizer": "adam", "adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": config.epsilon}
