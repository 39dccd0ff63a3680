"""Ops of flash-linear-attention (fla) on a GPU: choice of implementation, unsupported inputs, and calls.

Yang, Zhang 2024, "FLA: A Triton-Based Library for Hardware-Efficient Implementations of Linear Attention Mechanism".
"""

from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from packaging.version import Version
from torch import Tensor

from kernels.common.dispatch import Choice, choose_fast_or_plain, full_precision, on_gpu, on_this_gpu

FLA = Choice("fla", "flash-linear-attention's kernels")
DTYPES = (torch.bfloat16, torch.float16)
MAX_KEY_DIM = 256
HOPPER = 9
BROKEN_SINCE, FIXED_SINCE = Version("3.4.0"), Version("3.7.1")
"""Triton versions in [BROKEN_SINCE, FIXED_SINCE) miscompile the gradient of a per-head decay on Hopper. fla refuses
them (issue 640)."""
CHECKED_RELEASE = "0.6.0"
"""Release of fla whose sources were searched for the limits in `_TRITON_LIMITS`."""
_TRITON_LIMITS = (
    (Version("0"), Version("3.3.0"), "warns that errors may occur"),
    (BROKEN_SINCE, FIXED_SINCE, "refuses gradients of per-head decays on Hopper GPUs"),
    (Version("3.6.0"), Version("3.8.0"), "avoids tiles that are miscompiled on Hopper GPUs"),
    (Version("0"), Version("3.8.0"), "avoids kernels of 8 warps on Blackwell GPUs, where they race"),
)
"""Limits of fla by range of Triton versions: first version, first version after the range, and the limit."""


def choose_fla_or_plain(
    op: str, requested: str, unsupported_reason: str | None, q_bthd: Tensor, plain: Collection[str]
) -> str:
    """Resolve the caller's `implementation` to "fla" or a plain torch one; "auto" takes fla where it is supported.

    Args:
        op: name of the op, for messages.
        requested: `implementation` of the caller.
        unsupported_reason: output of `fla_unsupported_reason`.
        q_bthd: queries, for their device.
        plain: names of the plain implementations, "chunked" among them.

    Raises:
        ValueError: the implementation does not exist, or it is fla and does not support the inputs.
    """
    others = ["chunked", *(name for name in plain if name != "chunked")]
    return choose_fast_or_plain(op, requested, q_bthd, unsupported_reason, FLA, others).name


def fla_unsupported_reason(
    q_bthd: Tensor, op_unsupported_reason: Callable[[], str | None] = lambda: None
) -> str | None:
    """Return the reason why fla does not support an op's inputs, and the fix; None if it does.

    Args:
        q_bthd: queries [b, t, h, dk].
        op_unsupported_reason: function that returns a further reason, specific to the op, or None. It is called only
            for tensors of this machine's GPU. Example: `hopper_unsupported_reason`.
    """
    if not is_installed():
        return "flash-linear-attention is not installed: pip install flash-linear-attention"
    if not on_gpu(q_bthd):
        return f"the inputs are on {q_bthd.device}: move them to a GPU"
    if q_bthd.dtype not in DTYPES:
        return f"the inputs have dtype {q_bthd.dtype}: convert them to one of {[str(dtype) for dtype in DTYPES]}"
    if q_bthd.shape[3] > MAX_KEY_DIM:
        return f"the key dim is {q_bthd.shape[3]}: give at most {MAX_KEY_DIM}"
    return op_unsupported_reason() if on_this_gpu(q_bthd) else None


@cache
def is_installed() -> bool:
    """Return True if fla is installed. Cached, because each op asks in each call and the search reads directories."""
    return find_spec("fla") is not None


@cache
def hopper_unsupported_reason() -> str | None:
    """Return the reason why fla refuses per-head decays on this GPU, and the fix; None if it accepts them.

    Other ops of fla can use the tilelang package instead of Triton, but linear attention cannot.
    """
    triton = _version("triton")
    if torch.cuda.get_device_capability()[0] != HOPPER or triton is None or not BROKEN_SINCE <= triton < FIXED_SINCE:
        return None
    return (
        f"flash-linear-attention refuses per-head decays on a Hopper GPU under Triton {triton}, "
        f"which computes wrong gradients for them: pip install 'triton>={FIXED_SINCE}'"
    )


def triton_limits(triton: str) -> str:
    """Describe in one line what fla refuses or avoids under a Triton version."""
    known = [text for since, before, text in _TRITON_LIMITS if since <= Version(triton) < before]
    return f"under Triton {triton}, fla {CHECKED_RELEASE} {'; '.join(known) or 'refuses and avoids nothing'}"


def _version(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def run_fla(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: dict[str, Tensor],
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    *,
    values_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run an op of fla, with the interface of `kernels.common.stateful.run_plain`.

    Args:
        op: function of fla.
        inputs: tensors by fla's argument names, "v" among them.
        scale: factor on the queries.
        initial_state: state before the first token [b, h, dk, dv], any floating dtype; None for zeros.
        output_final_state: True to return the final state.
        values_first: True to store states as [b, h, dv, dk] in the kernels, which is faster for some ops.

    Returns:
        o: output [b, t, h, dv] in the values' dtype.
        state: final state [b, h, dk, dv] in fp32, or None without `output_final_state`.
    """
    state = None if initial_state is None else initial_state.float()
    layout = {"state_v_first": True} if values_first else {}
    if values_first and state is not None:
        state = state.mT
    with full_precision(inputs["v"]):
        out, last = op(**inputs, scale=scale, initial_state=state, output_final_state=output_final_state, **layout)
    if values_first and last is not None:
        last = last.mT
    return out.to(inputs["v"].dtype), last
