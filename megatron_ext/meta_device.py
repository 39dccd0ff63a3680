"""Building models without memory for their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_ext.errors import UserError


class _OnMeta(TorchFunctionMode):
    """Every new tensor is on the meta device, on whatever it is asked for."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("device") is not None:
            given["device"] = "meta"
        return function(*args, **given)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within it models are built without memory. A backward pass knows nothing of it: see `ledger.Watched`."""
    with torch.device("meta"), _OnMeta():
        yield


@contextmanager
def sizes_of(where: str) -> Iterator[None]:
    """Within it, a size that no tensor can have, or no memory of this machine, is the user's error.

    Args:
        where: what says the sizes, for the message.

    Raises:
        UserError: torch refuses a size, or the allocator does.
    """
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, MemoryError | OverflowError) and not any(said in text.lower() for said in _OF_SIZES):
            raise
        problem = f"describes a tensor that is too large to be made ({text[:_SHOWN]})"
        raise UserError(where, problem, "give the configuration that the model was made with") from error


_SHOWN = 140
_OF_SIZES = ("overflow", "allocate memory", "out of memory")
"""In what torch says of sizes that are too large for its integers, or for the memory."""
