"""Causal softmax attention through torch.nn.functional.scaled_dot_product_attention."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention_math import causal_mask, upcast
from kernels.softmax_attention.reference import distance_bias

CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_LENGTH, CUDNN_MULTIPLE = 2048, 128
"""cuDNN makes a plan for each shape, so it is for lengths that come again: long ones, and of these such as in training,
not a prompt's."""


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

    No mask is built in the plain causal case (no window, slopes or offset); in the others a [tq, tk] mask is, per head
    with slopes.
    """
    # No query sees a key behind the last query; without those keys, offset 0 is the op's own causal case.
    num_seen = query_offset + q_bthd.shape[1]
    k_bshd, v_bshe = k_bshd[:, :num_seen], v_bshe[:, :num_seen]
    if window is None and alibi_slopes is None and query_offset == 0:
        return _fused(q_bthd, k_bshd, v_bshe, None, scale)
    visible_ts = causal_mask(q_bthd, k_bshd, query_offset, window)
    if alibi_slopes is None:
        return _fused(q_bthd, k_bshd, v_bshe, visible_ts, scale)
    # The op wants the bias in q's dtype, and 16 bits cannot hold far distances: the whole op in fp32 then.
    q, k, v = upcast(q_bthd), upcast(k_bshd), upcast(v_bshe)
    bias_hts = distance_bias(q, k, alibi_slopes.to(q), query_offset)
    return _fused(q, k, v, bias_hts.masked_fill(~visible_ts, -torch.inf)[None], scale).to(v_bshe.dtype)


def _fused(q_bthd: Tensor, k_bshd: Tensor, v_bshe: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if q_bthd.is_meta and mask is None:  # torch would take its plain form
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
    """Kernels of cuDNN before FlashAttention-2 where they pay: on Hopper they take 0.6 of its time.

    Torch by itself takes the one or the other first, by what it finds in the process: on one machine cuDNN when alone,
    FlashAttention-2 in training with Transformer Engine. Where cuDNN cannot take the inputs, the next one does.
    """
    length = q_bthd.shape[1]
    if mask is not None or not q_bthd.is_cuda or length < CUDNN_LENGTH or length % CUDNN_MULTIPLE:
        return nullcontext()
    if torch.cuda.get_device_capability(q_bthd.device) < (9, 0):
        return nullcontext()
    return sdpa_kernel(CUDNN_FIRST, set_priority=True)
