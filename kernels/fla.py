"""flash-linear-attention's kernels (fla), which the stateful ops take on a GPU: what stands in their way.

Yang, Zhang 2024, "FLA: A Triton-Based Library for Hardware-Efficient Implementations of Linear Attention Mechanism".
"""

from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from kernels.dispatch import Choice, choose_fast_or_plain, full_precision, on_gpu

FLA = Choice("fla", "flash-linear-attention's kernels")
DTYPES = (torch.bfloat16, torch.float16)
MAX_KEY_DIM = 256
HOPPER = 9
WRONG_SINCE, RIGHT_SINCE = Version("3.4.0"), Version("3.7.1")
"""Between these two, Triton compiles the gradient of a decay a head wrongly for Hopper; fla refuses it (issue 640)."""


def choose_fla_or_plain(op: str, requested: str, obstacle: str | None, q_bthd: Tensor, plain: Collection[str]) -> str:
    """Turn the caller's `implementation` into "fla" or a plain torch form; "auto" takes fla on a GPU where it can.

    Args:
        op: the op's name, for messages.
        requested: what the caller asked for.
        obstacle: see `fla_obstacle`.
        q_bthd: queries; only their device counts.
        plain: the plain forms, "chunked" among them.

    Raises:
        ValueError: there is no such implementation, or it is fla and there is an obstacle.
    """
    others = ["chunked", *(name for name in plain if name != "chunked")]
    return choose_fast_or_plain(op, requested, q_bthd, obstacle, FLA, others).name


def fla_obstacle(q_bthd: Tensor, refused: Callable[[], str | None] = lambda: None) -> str | None:
    """Say why fla cannot take an op's inputs, with the mend; None when it can.

    Args:
        q_bthd: queries [b, t, h, dk].
        refused: what else is in the way of an op, asked on a GPU alone; see `refused_on_hopper`.
    """
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed: pip install flash-linear-attention"
    if not on_gpu(q_bthd):
        return f"the inputs are on {q_bthd.device}: move them to a GPU"
    if q_bthd.dtype not in DTYPES:
        return f"the inputs have dtype {q_bthd.dtype}: convert them to one of {[str(dtype) for dtype in DTYPES]}"
    if q_bthd.shape[3] > MAX_KEY_DIM:
        return f"the key dim is {q_bthd.shape[3]}: give at most {MAX_KEY_DIM}"
    return None if q_bthd.is_meta else refused()  # shapes alone are no matter of a GPU's kind


@cache
def refused_on_hopper() -> str | None:
    """Say that fla refuses decays of whole heads on this GPU, with the mend; None when it does not.

    In other ops it can do without Triton where the tilelang package is installed; for linear attention it cannot.
    """
    triton = _version("triton")
    if torch.cuda.get_device_capability()[0] != HOPPER or triton is None or not WRONG_SINCE <= triton < RIGHT_SINCE:
        return None
    return (
        f"flash-linear-attention refuses decays of whole heads on a Hopper GPU under Triton {triton}, "
        f"which gets their gradients wrong: pip install 'triton>={RIGHT_SINCE}'"
    )


def _version(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def run_fla(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: dict[str, Tensor],
    scale: float | None,
    initial_state: Tensor | None,
    return_final_state: bool,
    *,
    values_first: bool = False,
) -> Any:
    """Run one of fla's ops as `kernels.stateful.run_form` runs a plain form.

    Args:
        op: of fla.
        inputs: its tensors by its names, "v" among them.
        scale: factor on the queries.
        initial_state: [b, h, dk, dv] before the first token; None for zeros.
        return_final_state: also return the last state.
        values_first: have the op keep states as [dv, dk], which some are faster with.

    Returns:
        o [b, t, h, dv] in the values' dtype; with return_final_state also the state [b, h, dk, dv] in fp32.
    """
    state = None if initial_state is None else initial_state.float()
    layout = {"state_v_first": True} if values_first else {}
    if values_first and state is not None:
        state = state.mT
    with full_precision(inputs["v"]):
        out, last = op(**inputs, scale=scale, initial_state=state, output_final_state=return_final_state, **layout)
    if values_first and last is not None:
        last = last.mT
    out = out.to(inputs["v"].dtype)
    return (out, last) if return_final_state else out
