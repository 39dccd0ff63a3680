"""Parameter groups with and without weight decay, for optimizers that Megatron does not create."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ext.utils.errors import UserError


def parameter_groups(chunks: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay.

    Vectors have none, nor do parameters with `no_weight_decay` (`parallel.parameters`).

    Returns:
        The non-empty groups, with `wd_mult` for Megatron's schedule.

    Raises:
        UserError: parameters have several dtypes. DeepSpeed flattens a group into one tensor, and torch would silently
            promote the 16-bit ones.
    """
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    if len(dtypes) > 1:
        raise UserError(
            "optimizer.sharding",
            f"DeepSpeed's ZeRO holds parameters of one dtype, and this model has {' and '.join(dtypes)}",
            "set optimizer.sharding=megatron",
        )
    decayed = [p for p in parameters if p.dim() > 1 and not getattr(p, "no_weight_decay", False)]
    known = {id(p) for p in decayed}
    others = [p for p in parameters if id(p) not in known]
    groups = [{"params": decayed, "wd_mult": 1.0}, {"params": others, "wd_mult": 0.0}]
    return [group for group in groups if group["params"]]
