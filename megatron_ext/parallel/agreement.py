"""Collectives of small values, and checks that are made alike on all ranks.

Values travel as JSON in tensors of bytes. torch's own collectives of objects unpickle what they receive, which lets any
peer that reaches a rank run code on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.errors import UserError


def on_every_rank(check: Callable[[], object]) -> None:
    """Run a check whose work the ranks share; if it fails on any, fail on all with the first one's error.

    A collective call; without a process group, this process is all there is.

    Args:
        check: finds nothing, or raises a `UserError`.

    Raises:
        UserError: the error of the first rank that has one, of the same class.
    """
    error: UserError | None = None
    try:
        check()
    except UserError as found:
        error = found
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    said = next((one for one in from_every_rank(None if error is None else _parts(error)) if one is not None), None)
    if said is not None:
        raise _error(*said)


def from_every_rank(value: Any) -> list[Any]:
    """The value of each rank, in the order of the ranks, on all of them.

    A collective call; without a process group, this process is all there is.

    Args:
        value: this rank's, of what JSON has: numbers, texts, None, lists (a tuple becomes one), dictionaries by text.
    """
    if not dist.is_initialized():
        return [value]
    return gather_values(value, None)


def gather_values(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """As `from_every_rank`, of the ranks of a group."""
    return [json.loads(content) for content in _gathered(_encoded(value), group, None) or ()]


def gather_on_first(content: bytes) -> list[bytes] | None:
    """The bytes of each rank, in the order of the ranks, on rank 0, and None on the others; a collective call."""
    return _gathered(content, None, 0)


def from_first_rank(value: Any) -> Any:
    """Rank 0's value, as JSON has it, on all ranks; a collective call.

    Args:
        value: on rank 0; what the others give is not looked at.
    """
    content = _encoded(value) if dist.get_rank() == 0 else b""
    size = torch.tensor([len(content)], dtype=torch.int64, device=_device(None))
    dist.broadcast(size, 0)
    bytes_x = _bytes(content, int(size), size.device)
    dist.broadcast(bytes_x, 0)
    return json.loads(_content(bytes_x))


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _gathered(content: bytes, group: dist.ProcessGroup | None, to: int | None) -> list[bytes] | None:
    device, ranks = _device(group), dist.get_world_size(group)
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes]
    own = _bytes(content, max(lengths), device)
    if to is None or dist.get_rank(group) == to:
        parts: list[Tensor] | None = [torch.empty_like(own) for _ in range(ranks)]
    else:
        parts = None
    if to is None:
        dist.all_gather(parts, own, group=group)
    else:
        dist.gather(own, parts, to, group=group)
    if parts is None:
        return None
    return [_content(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the tensors of a group's messages lie."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _bytes(content: bytes, length: int, device: torch.device) -> Tensor:
    """Bytes as a tensor, uint8 [length], filled up with zeros."""
    return torch.frombuffer(bytearray(content.ljust(max(length, 1), b"\0")), dtype=torch.uint8).to(device)


def _content(bytes_x: Tensor) -> bytes:
    return bytes_x.cpu().numpy().tobytes()


# --- errors ----------------------------------------------------------------------------------------------------------


def _parts(error: UserError) -> tuple[str, list[str], list[str]]:
    """An error as JSON has it: its class, what that is made of, and what every `UserError` is made of."""
    kind, arguments = cast(tuple[type, tuple[str, ...]], error.__reduce__()[:2])
    return _name(kind), list(arguments), [error.where, error.problem, error.mend]


def _error(name: str, arguments: list[str], plain: list[str]) -> UserError:
    kind = {_name(one): one for one in _kinds(UserError)}.get(name)
    return UserError(*plain) if kind is None else kind(*arguments)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _kinds(kind: type[UserError]) -> Iterator[type[UserError]]:
    """A class of errors and all that are derived from it; those of modules that nobody has imported are not raised."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)
