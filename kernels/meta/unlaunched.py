"""Ops on meta tensors: find what a GPU would save and return, without a GPU and without memory.

`selectron plan` plans the memory of a step this way. On meta tensors the ops take their GPU
implementations (`kernels.common.dispatch.on_gpu`). Inside `unlaunched`, Triton kernels are not launched: an
implementation only allocates its outputs and saves tensors for the backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from kernels.common.dispatch import HAS_TRITON


@contextmanager
def unlaunched() -> Iterator[None]:
    """Context manager that skips the launches of all Triton kernels; outputs stay as allocated.

    Nothing is compiled. FlexAttention accepts meta tensors, which it otherwise rejects.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # nothing is computed
        stack.enter_context(patch.object(flex_attention, "_validate_device", _do_nothing))
        stack.enter_context(patch.object(flex_attention, "flex_attention_hop", _attention_output_shapes))
        if HAS_TRITON:
            from triton.runtime.jit import KernelInterface

            stack.enter_context(patch.object(KernelInterface, "__getitem__", lambda self, grid: _do_nothing))
        yield


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand-in for a kernel launch."""


def _attention_output_shapes(q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Stand-in for FlexAttention's operator: outputs and log-sum-exps with the layout of flash attention."""
    out_bhtd, lse_bht, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_bhtd, k_bhsd, v_bhsd)
    return out_bhtd, lse_bht, lse_bht
