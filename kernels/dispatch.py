"""What every op's interface shares: checks of the arguments, and the choice of an implementation."""

import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """An implementation and why it was taken."""

    name: str
    reason: str


def choose(op: str, requested: str, available: Collection[str], automatic: Choice, plain: str) -> Choice:
    """Turn the caller's `implementation` into one of the available ones.

    Args:
        op: the op's name, for messages.
        requested: what the caller asked for; "auto" takes `automatic`.
        available: the implementations of this op.
        automatic: what "auto" means for these inputs, and why.
        plain: what it means inside `plain_forms`.

    Raises:
        ValueError: the requested implementation does not exist.
    """
    if requested not in ("auto", *available):
        raise ValueError(f"implementation is {requested!r}, but {op} has: use one of {['auto', *available]}")
    if requested != "auto":
        chosen = Choice(requested, "asked for")
    else:
        chosen = Choice(plain, "plain forms are asked for") if _plain_only else automatic
    if not torch.compiler.is_compiling():  # a log line would break the graph
        logger.debug("%s: %s (%s)", op, chosen.name, chosen.reason)
        for record in _records:
            record.append((op, chosen))
    return chosen


_plain_only = False


@contextmanager
def plain_forms() -> Iterator[None]:
    """Let "auto" mean plain torch in every op: what the results of faster forms can be held against."""
    global _plain_only
    before, _plain_only = _plain_only, True
    try:
        yield
    finally:
        _plain_only = before


_records: list[list[tuple[str, Choice]]] = []


@contextmanager
def recorded_choices() -> Iterator[list[tuple[str, Choice]]]:
    """Give a list that grows by (op, choice) with each call of an op."""
    record: list[tuple[str, Choice]] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records.pop()


def check_option(argument: str, value: str, allowed: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{argument} is {value!r}: use one of {list(allowed)}")


def check_positive_int(argument: str, value: int) -> None:
    """Raise ValueError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument} is {value!r}: give a whole number of at least 1")


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """Give the scale of the scores, head_dim**-0.5 when None.

    Raises:
        ValueError: negative or not finite (the highest product must stay the highest score).
    """
    if scale is None:
        return head_dim**-0.5
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale is {scale!r}: give a number that is not negative, or None for head_dim**-0.5")
    return float(scale)


def check_any_floating(**tensors: Tensor) -> None:
    """Raise ValueError unless each tensor has a floating-point dtype, whichever."""
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}: convert it to a floating-point dtype")


def check_floating(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors share the first one's device and floating-point dtype."""
    (first_name, first), *rest = tensors.items()
    check_any_floating(**{first_name: first})
    for name, x in rest:
        if x.dtype != first.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} but {first_name} has {first.dtype}: convert one of them")
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device} but {first_name} is on {first.device}: move one of them")


def check_shapes(q: Tensor, expected: Mapping[str, tuple[Tensor, Sequence[int]]], reader: str = "q") -> None:
    """Raise ValueError unless each named tensor has its shape and is where q is, which the op may call otherwise."""
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != tuple(shape):
            raise ValueError(
                f"{name} has shape {list(x.shape)}: give {list(shape)}, to go with {reader} {list(q.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but {reader} is on {q.device}: move one of them")


def check_attention(q_bthd: Tensor, k_bshd: Tensor, v_bshe: Tensor, query_offset: int) -> None:
    """Check the arguments that all attention-like ops share.

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bshd: keys [b, tk, hkv, d], hq a multiple of hkv.
        v_bshe: values [b, tk, hkv, dv].
        query_offset: global position of the first query.

    Raises:
        ValueError: a shape, dtype, device or offset does not fit; the message names it.
    """
    for name, x in (("q", q_bthd), ("k", k_bshd), ("v", v_bshe)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}: give [batch, length, heads, head_dim]")
        if x.numel() == 0:
            raise ValueError(f"{name} has shape {list(x.shape)}: give at least one element in each dimension")
    check_floating(q=q_bthd, k=k_bshd, v=v_bshe)
    if k_bshd.shape[:3] != v_bshe.shape[:3]:
        raise ValueError(f"v has shape {list(v_bshe.shape)}: match batch, length, heads of k, {list(k_bshd.shape)}")
    if q_bthd.shape[0] != k_bshd.shape[0] or q_bthd.shape[3] != k_bshd.shape[3]:
        raise ValueError(f"k has shape {list(k_bshd.shape)}: match batch and head_dim of q, {list(q_bthd.shape)}")
    if q_bthd.shape[2] % k_bshd.shape[2]:
        raise ValueError(f"q has {q_bthd.shape[2]} heads: give a multiple of the {k_bshd.shape[2]} heads of k and v")
    check_query_offset(query_offset, q_bthd.shape[1], k_bshd.shape[1])


def check_query_offset(query_offset: int, num_queries: int, num_keys: int) -> None:
    """Raise ValueError unless every query's global position is that of a key."""
    if isinstance(query_offset, bool) or not isinstance(query_offset, int) or query_offset < 0:
        raise ValueError(f"query_offset is {query_offset!r}: give the first query's position, a whole number from 0")
    if query_offset + num_queries > num_keys:
        raise ValueError(
            f"query_offset is {query_offset}, so {num_queries} queries end at position {query_offset + num_queries}, "
            f"beyond the {num_keys} keys: pass the keys of the whole sequence, or a smaller offset"
        )


def on_gpu(x: Tensor) -> bool:
    """Whether forms for a GPU are meant: x is on one, or on the meta device, which computes shapes alone.

    What a step keeps in memory is planned with meta tensors, and has to be what a GPU will keep; see `unlaunched`.
    """
    return x.is_cuda or x.is_meta


HAS_TRITON = find_spec("triton") is not None
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_TRITON_HEAD_DIM = 256


def triton_obstacle(**tensors: Tensor) -> str | None:
    """Say why no Triton kernel of ours can take these tensors, by name, with the mend; None when one may."""
    if not HAS_TRITON:
        return "Triton is not installed: pip install triton"
    for name, x in tensors.items():
        if not (on_gpu(x) or os.environ.get("TRITON_INTERPRET") == "1"):
            return f"{name} is on {x.device}: move it to a GPU"
        if x.dtype not in TRITON_DTYPES:
            return f"{name} has dtype {x.dtype}: convert it to one of {[str(dtype) for dtype in TRITON_DTYPES]}"
    return None


def triton_attention_obstacle(q_bthd: Tensor, v_bshe: Tensor) -> str | None:
    """Say why our Triton attention kernels cannot take these tensors, with the mend; None when they can."""
    obstacle = triton_obstacle(q=q_bthd)
    if obstacle is not None:
        return obstacle
    if q_bthd.shape[3] > MAX_TRITON_HEAD_DIM:
        return f"q has head_dim {q_bthd.shape[3]}: give at most {MAX_TRITON_HEAD_DIM}"
    if v_bshe.shape[3] != q_bthd.shape[3]:
        return f"v has head_dim {v_bshe.shape[3]}: give that of q, {q_bthd.shape[3]}"
    return None


def choose_fast_or_plain(
    op: str, requested: str, x: Tensor, obstacle: str | None, fast: Choice, plain: Sequence[str]
) -> Choice:
    """Turn the caller's `implementation` into the fast one of an op, or a plain torch one.

    Args:
        op: the op's name, for messages.
        requested: what the caller asked for; "auto" takes the fast one on a GPU, unless there is an obstacle.
        x: an input of the op; only its device counts.
        obstacle: why the fast one cannot take these inputs, with the mend; None when it can.
        fast: the fast implementation, and why "auto" takes it.
        plain: the others; "auto" takes the first of them where it does not take the fast one.

    Raises:
        ValueError: the requested implementation does not exist, or it is the fast one and there is an obstacle.
    """
    if not on_gpu(x):
        automatic = Choice(plain[0], f"{fast.name}'s kernels need a GPU, and the inputs are on {x.device}")
    else:
        automatic = fast if obstacle is None else Choice(plain[0], obstacle)
    chosen = choose(op, requested, (*plain, fast.name), automatic, plain[0])
    if chosen.name == fast.name and obstacle is not None:
        raise ValueError(f"implementation is {fast.name!r}, but {obstacle}")
    # For those who did not choose the plain one.
    if requested == "auto" and on_gpu(x) and obstacle is not None and not torch.compiler.is_compiling():
        _warn_once(f"{op} takes its slow plain form on {x.device}, because {obstacle}")
    return chosen


def choose_triton_or_reference(
    op: str, requested: str, x: Tensor, obstacle: str | None, plain: Sequence[str] = ("reference",)
) -> Choice:
    """As `choose_fast_or_plain`, for an op that has "triton"."""
    return choose_fast_or_plain(op, requested, x, obstacle, Choice("triton", "fused on CUDA"), plain)


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """Switch autocast off: it would undo the upcasts to fp32 that the definitions ask for."""
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        yield
