"""Causal softmax attention with torch.nn.functional.scaled_dot_product_attention."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.common.attention_math import causal_mask, upcast
from kernels.softmax_attention.reference import distance_bias

CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_MIN_LENGTH, CUDNN_MULTIPLE = 2048, 128
"""Minimum sequence length for cuDNN, and the number that the length must be a multiple of. cuDNN builds a plan for each
shape, so it pays only if shapes recur, as in training. Lengths of prompts do not recur."""


def softmax_attention_sdpa(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshe: Tensor,
    *,
    scale: float,
    window: int | None,
    alibi_slopes: Tensor | None,
    query_offset: int,
) -> Tensor:
    """Compute attention with torch's fused op. Arguments as in `softmax_attention`, checked there.

    The plain causal case (no window, slopes or offset) builds no mask. All other cases build a [tq, tk] mask, one per
    head with slopes.
    """
    # No query sees a key after the last query. Without those keys, offset 0 is the op's own causal case.
    num_seen = query_offset + q_bthd.shape[1]
    k_bshd, v_bshe = k_bshd[:, :num_seen], v_bshe[:, :num_seen]
    if window is None and alibi_slopes is None and query_offset == 0:
        return _fused(q_bthd, k_bshd, v_bshe, None, scale)
    visible_ts = causal_mask(q_bthd, k_bshd, query_offset, window)
    if alibi_slopes is None:
        return _fused(q_bthd, k_bshd, v_bshe, visible_ts, scale)
    # The op requires the bias in q's dtype, and 16 bits cannot represent large distances: compute everything in fp32.
    q, k, v = upcast(q_bthd), upcast(k_bshd), upcast(v_bshe)
    bias_hts = distance_bias(q, k, alibi_slopes.to(q), query_offset)
    return _fused(q, k, v, bias_hts.masked_fill(~visible_ts, -torch.inf)[None], scale).to(v_bshe.dtype)


def _fused(q_bthd: Tensor, k_bshd: Tensor, v_bshe: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if q_bthd.is_meta and mask is None:  # torch would choose its unfused implementation
        heads_first = (x.transpose(1, 2) for x in (q_bthd, k_bshd, v_bshe))
        out_bhte, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, True, scale=scale)
        return out_bhte.transpose(1, 2)
    with _backends(q_bthd, mask):
        out_bhte = scaled_dot_product_attention(
            q_bthd.transpose(1, 2),
            k_bshd.transpose(1, 2),
            v_bshe.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q_bthd.shape[2] != k_bshd.shape[2],
        )
    return out_bhte.transpose(1, 2)


def _backends(q_bthd: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    """Context manager that prefers cuDNN to FlashAttention-2 for long sequences: on Hopper it takes 0.6 of the time.

    By itself, torch's preference depends on the process: on the same machine cuDNN alone, but FlashAttention-2 in
    training with Transformer Engine. If cuDNN does not support the inputs, the next backend runs.
    """
    length = q_bthd.shape[1]
    if mask is not None or not q_bthd.is_cuda or length < CUDNN_MIN_LENGTH or length % CUDNN_MULTIPLE:
        return nullcontext()
    if torch.cuda.get_device_capability(q_bthd.device) < (9, 0):
        return nullcontext()
    return sdpa_kernel(CUDNN_FIRST, set_priority=True)
