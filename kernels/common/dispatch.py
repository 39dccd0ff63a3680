"""Argument checks and implementation choice, shared by the interfaces of all ops."""

import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """An implementation and the reason for choosing it."""

    name: str
    reason: str


def choose(op: str, requested: str, available: Collection[str], automatic: Choice, plain: str) -> Choice:
    """Resolve the caller's `implementation` to an available one, log the choice and record it.

    Args:
        op: name of the op, for messages.
        requested: `implementation` of the caller; "auto" takes `automatic`.
        available: names of the op's implementations.
        automatic: the implementation that "auto" selects for these inputs, and the reason.
        plain: the implementation that "auto" selects inside `plain_torch`.

    Raises:
        ValueError: the requested implementation does not exist.
    """
    if requested not in ("auto", *available):
        raise ValueError(f"implementation is {requested!r}, but {op} has: use one of {['auto', *available]}")
    if requested != "auto":
        chosen = Choice(requested, "requested")
    else:
        chosen = Choice(plain, "plain torch requested") if _plain_only.is_set else automatic
    if not torch.compiler.is_compiling():  # a log call would break the graph
        logger.debug("%s: %s (%s)", op, chosen.name, chosen.reason)
        for record in _records:
            record.append((op, chosen))
    return chosen


class _Flag:
    """Process-wide flag that is set within a context manager."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def set(self) -> Iterator[None]:
        """Context manager that sets the flag and restores its previous value at the end."""
        before, self.is_set = self.is_set, True
        try:
            yield
        finally:
            self.is_set = before


_plain_only = _Flag()


def plain_torch() -> AbstractContextManager[None]:
    """Context manager in which "auto" selects plain torch in every op, as a baseline for the faster implementations."""
    return _plain_only.set()


_records: list[list[tuple[str, Choice]]] = []


@contextmanager
def recorded_choices() -> Iterator[list[tuple[str, Choice]]]:
    """Context manager that yields a list to which each call of an op appends (op, choice).

    Contexts may overlap in any order, for example in generators. Each list receives the calls within its own context.
    """
    record: list[tuple[str, Choice]] = []
    _records.append(record)
    try:
        yield record
    finally:
        # Removed by identity, because two records may be equal lists, and the last one may belong to another context.
        _records[:] = [other for other in _records if other is not record]


def check_option(argument: str, value: str, allowed: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of the allowed strings."""
    if value not in allowed:
        raise ValueError(f"{argument} is {value!r}: use one of {list(allowed)}")


def check_positive_int(argument: str, value: int) -> None:
    """Raise ValueError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument} is {value!r}: give a whole number of at least 1")


def resolve_scale(scale: float | None, default: float) -> float:
    """Return the factor on the queries, or `default` for None.

    Raises:
        ValueError: the scale is not a positive finite number. Zero would make all scores equal, and a negative scale
            would reverse their order.
    """
    if scale is None:
        return default
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale!r}: give a positive number, or None for {default:.6g}")
    return float(scale)


def check_any_floating(**tensors: Tensor) -> None:
    """Raise ValueError unless each tensor has a floating-point dtype; the dtypes may differ."""
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}: convert it to a floating-point dtype")


def check_floating(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors share the first one's device and floating-point dtype."""
    (first_name, first), *others = tensors.items()
    check_any_floating(**{first_name: first})
    for name, x in others:
        if x.dtype != first.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} but {first_name} has {first.dtype}: convert one of them")
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device} but {first_name} is on {first.device}: move one of them")


def check_shapes(main: Tensor, expected: Mapping[str, tuple[Tensor, Sequence[int]]], main_name: str = "q") -> None:
    """Raise ValueError unless each named tensor has the expected shape and the device of the main input.

    Args:
        main: the op's main input, on which the expected shapes depend.
        expected: tensors by name, each with its shape.
        main_name: the op's name of the main input, for messages.
    """
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != tuple(shape):
            raise ValueError(
                f"{name} has shape {list(x.shape)}: give {list(shape)}, to match {main_name} {list(main.shape)}"
            )
        if x.device != main.device:
            raise ValueError(f"{name} is on {x.device} but {main_name} is on {main.device}: move one of them")


def check_attention(q_bthd: Tensor, k_bshd: Tensor, v_bshe: Tensor, query_offset: int) -> None:
    """Check the arguments that all attention ops share.

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
    """Raise ValueError unless the queries' global positions lie within the keys."""
    if isinstance(query_offset, bool) or not isinstance(query_offset, int) or query_offset < 0:
        raise ValueError(f"query_offset is {query_offset!r}: give the first query's position, a whole number from 0")
    if query_offset + num_queries > num_keys:
        raise ValueError(
            f"query_offset is {query_offset}, so {num_queries} queries end at position {query_offset + num_queries}, "
            f"beyond the {num_keys} keys: pass the keys of the whole sequence, or a smaller offset"
        )


def on_gpu(x: Tensor) -> bool:
    """Return True if the GPU implementations apply: x is on a GPU, or on the meta device.

    Memory planning runs a step on meta tensors (see `kernels.meta.unlaunched`). That step must save the same tensors
    for the backward pass as a step on a GPU.
    """
    return x.is_cuda or x.is_meta


_meta_is_this_gpu = _Flag()


def meta_as_this_gpu() -> AbstractContextManager[None]:
    """Context manager in which meta tensors stand for tensors of this machine's GPU.

    Outside the context, meta tensors stand for tensors of any GPU. Conditions on the GPU model are then not checked.
    """
    return _meta_is_this_gpu.set()


def on_this_gpu(x: Tensor) -> bool:
    """Return True if x is on a GPU of this machine, or stands for such a tensor (see `meta_as_this_gpu`)."""
    return x.is_cuda or (x.is_meta and _meta_is_this_gpu.is_set)


HAS_TRITON = find_spec("triton") is not None
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_TRITON_HEAD_DIM = 256


def triton_unsupported_reason(**tensors: Tensor) -> str | None:
    """Return the reason why Triton kernels cannot process these tensors, and the fix; None if there is no reason."""
    if not HAS_TRITON:
        return "Triton is not installed: pip install triton"
    for name, x in tensors.items():
        if not (on_gpu(x) or os.environ.get("TRITON_INTERPRET") == "1"):
            return f"{name} is on {x.device}: move it to a GPU"
        if x.dtype not in TRITON_DTYPES:
            return f"{name} has dtype {x.dtype}: convert it to one of {[str(dtype) for dtype in TRITON_DTYPES]}"
    return None


def triton_attention_unsupported_reason(q_bthd: Tensor, v_bshe: Tensor) -> str | None:
    """Return the reason why the Triton attention kernels do not support these tensors, and the fix; None if they do."""
    unsupported_reason = triton_unsupported_reason(q=q_bthd)
    if unsupported_reason is not None:
        return unsupported_reason
    if q_bthd.shape[3] > MAX_TRITON_HEAD_DIM:
        return f"q has head_dim {q_bthd.shape[3]}: give at most {MAX_TRITON_HEAD_DIM}"
    if v_bshe.shape[3] != q_bthd.shape[3]:
        return f"v has head_dim {v_bshe.shape[3]}: give that of q, {q_bthd.shape[3]}"
    return None


def choose_fast_or_plain(
    op: str, requested: str, x: Tensor, unsupported_reason: str | None, fast: Choice, plain: Sequence[str]
) -> Choice:
    """Resolve the caller's `implementation` to the op's fast implementation or to a plain torch one.

    Args:
        op: name of the op, for messages.
        requested: `implementation` of the caller; "auto" selects the fast one on a GPU if it supports these inputs.
        x: an input of the op, for its device.
        unsupported_reason: reason why the fast implementation does not support these inputs, and the fix; None if it
            supports them.
        fast: the fast implementation, and the reason for choosing it.
        plain: names of the plain implementations; "auto" falls back to the first.

    Raises:
        ValueError: the requested implementation does not exist, or it is the fast one and does not support the inputs.
    """
    if not on_gpu(x):
        automatic = Choice(plain[0], f"{fast.name}'s kernels need a GPU, and the inputs are on {x.device}")
    else:
        automatic = fast if unsupported_reason is None else Choice(plain[0], unsupported_reason)
    chosen = choose(op, requested, (*plain, fast.name), automatic, plain[0])
    if chosen.name == fast.name and unsupported_reason is not None:
        raise ValueError(f"implementation is {fast.name!r}, but {unsupported_reason}")
    # A caller who requested the plain implementation needs no warning.
    if requested == "auto" and on_gpu(x) and unsupported_reason is not None and not torch.compiler.is_compiling():
        where = "a GPU" if x.is_meta else x.device
        _warn_once(f"{op} uses its slow plain torch implementation on {where}, because {unsupported_reason}")
    return chosen


def choose_triton_or_reference(
    op: str, requested: str, x: Tensor, unsupported_reason: str | None, plain: Sequence[str] = ("reference",)
) -> Choice:
    """Call `choose_fast_or_plain` for an op whose fast implementation is "triton"."""
    return choose_fast_or_plain(op, requested, x, unsupported_reason, Choice("triton", "fused on CUDA"), plain)


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """Context manager that disables autocast on the device of x. Autocast would undo the ops' upcasts to fp32."""
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        yield
