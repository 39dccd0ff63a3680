"""Argument checks and the plain torch driver, shared by the interfaces of the stateful ops."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.common.attention_math import compute_dtype
from kernels.common.dispatch import check_floating, check_shapes, full_precision


def check_state_op(
    q_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, initial_state: Tensor | None, *, q_name: str = "q"
) -> None:
    """Check the arguments that all ops with a matrix-valued state share.

    Args:
        q_bthd: queries [b, t, h, dk].
        k_bthd: keys [b, t, h, dk].
        v_bthe: values [b, t, h, dv].
        initial_state: state before the first token [b, h, dk, dv], or None.
        q_name: the op's name of the queries, for messages.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names it.
    """
    for name, x in ((q_name, q_bthd), ("v", v_bthe)):
        if x.dim() != 4 or x.numel() == 0:
            raise ValueError(f"{name} has shape {list(x.shape)}: give [batch, length, heads, head_dim], all at least 1")
    check_floating(**{q_name: q_bthd}, k=k_bthd, v=v_bthe)
    expected = {"k": (k_bthd, q_bthd.shape), "v": (v_bthe, (*q_bthd.shape[:3], v_bthe.shape[3]))}
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (q_bthd.shape[0], *q_bthd.shape[2:], v_bthe.shape[3]))
    check_shapes(q_bthd, expected, q_name)


def check_log_decay(g: Tensor) -> None:
    """Raise ValueError unless the log decay is in fp32 or float64."""
    if g.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"g has dtype {g.dtype}: give the log decay in torch.float32")


def run_plain(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run a plain torch implementation of an op in fp32, or in float64 for float64.

    Args:
        function: takes the inputs, `scale` and `state_bhde`; returns the output and the final state.
        inputs: queries [b, t, h, dk], keys, values [b, t, h, dv], and the op's further tensors.
        scale: factor on the queries.
        initial_state: state before the first token [b, h, dk, dv], any floating dtype; None for zeros.
        output_final_state: True to return the final state.

    Returns:
        o: output [b, t, h, dv] in the values' dtype.
        state: final state [b, h, dk, dv] in fp32 or float64, or None without `output_final_state`.
    """
    q, _, v, *_ = inputs
    dtype = compute_dtype(q)
    batch, _, heads, key_dim = q.shape
    if initial_state is None:
        initial_state = torch.zeros(batch, heads, key_dim, v.shape[-1], dtype=dtype, device=q.device)
    with full_precision(q):
        out, state = function(*(x.to(dtype) for x in inputs), scale=scale, state_bhde=initial_state.to(dtype))
    return out.to(v.dtype), state if output_final_state else None
