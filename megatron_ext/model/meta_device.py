"""Construction of models on the meta device, without memory for their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_ext.utils.errors import UserError


class _MetaDeviceMode(TorchFunctionMode):
    """Mode in which every tensor with an explicit device is created on the meta device."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        meta_kwargs = dict(kwargs or {})
        if meta_kwargs.get("device") is not None:
            meta_kwargs["device"] = "meta"
        return function(*args, **meta_kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Context manager under which models are built on the meta device.

    It does not affect tensors that a backward pass creates; `ledger.LedgerMode` does.
    """
    with torch.device("meta"), _MetaDeviceMode():
        yield


@contextmanager
def reject_impossible_sizes(where: str) -> Iterator[None]:
    """Context manager that turns torch's errors on impossible tensor sizes, or lack of memory, into user errors.

    Args:
        where: source of the sizes, for the message.

    Raises:
        UserError: torch or the allocator refuses a size.
    """
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        text = " ".join(str(error).split())
        is_size_error = any(message in text.lower() for message in _SIZE_MESSAGES)
        if not isinstance(error, MemoryError | OverflowError) and not is_size_error:
            raise
        problem = f"describes a tensor that is too large to be made ({text[:_MAX_SHOWN]})"
        raise UserError(where, problem, "give the configuration that the model was made with") from error


_MAX_SHOWN = 140
_SIZE_MESSAGES = ("overflow", "allocate memory", "out of memory")
"""Substrings of torch's messages about sizes that exceed its integers or the memory."""
