"""Ops on meta tensors: what they would keep and return on a GPU, without one and without memory.

A step is planned with them (`selectron plan`). The ops take their forms for a GPU, as `dispatch.on_gpu` says. Inside
`unlaunched` Triton's kernels are left out: all that a form does is to allocate, and to keep for its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from kernels.dispatch import HAS_TRITON


@contextmanager
def unlaunched() -> Iterator[None]:
    """Leave Triton's kernels out, of ours and of others: their outputs stay as they were allocated.

    Nothing is compiled, and FlexAttention takes meta tensors, which by itself it does not.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(patch.object(flex_attention, "_validate_device", _do_nothing))
        stack.enter_context(patch.object(flex_attention, "flex_attention_hop", _attention_of_any_mask))
        if HAS_TRITON:
            from triton.runtime.jit import KernelInterface

            stack.enter_context(patch.object(KernelInterface, "__getitem__", lambda self, grid: _do_nothing))
        yield


def _do_nothing(*_: Any, **__: Any) -> None:
    """What a kernel does to meta tensors."""


def _attention_of_any_mask(q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """What FlexAttention's operator keeps and returns: outputs and logarithms, as any kernel of this kind."""
    out_bhtd, lse_bht, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_bhtd, k_bhsd, v_bhsd)
    return out_bhtd, lse_bht, lse_bht
