"""Collectives of small values, and checks whose outcome is identical on all ranks.

Values are sent as JSON in byte tensors. torch's object collectives are not used, because they unpickle what they
receive: any peer that can reach a rank could run code on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.utils.errors import UserError


def raise_on_all_ranks(check: Callable[[], object]) -> None:
    """Run a check on every rank. If it fails on any rank, raise the error of the first failing rank on all ranks.

    A collective call. Without a process group, only this process runs the check.

    Args:
        check: function that raises a `UserError` if the check fails.

    Raises:
        UserError: the error of the first failing rank, of the same class.
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
    failure = next(
        (parts for parts in gather_objects(None if error is None else _error_to_json(error)) if parts is not None), None
    )
    if failure is not None:
        raise _error_from_json(*failure)


def gather_objects(value: Any) -> list[Any]:
    """Gather the value of each rank, in the order of the ranks, on all ranks.

    A collective call. Without a process group, the result is this process's value alone.

    Args:
        value: this rank's value, of JSON types: numbers, strings, None, lists (tuples become lists) and dictionaries
            with string keys.
    """
    if not dist.is_initialized():
        return [value]
    return gather_values(value, None)


def gather_values(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather values as `gather_objects` does, over the ranks of a group."""
    return [json.loads(content) for content in _gather_bytes(_encode(value), group, None) or ()]


def gather_on_first(content: bytes) -> list[bytes] | None:
    """Gather the bytes of each rank, in the order of the ranks, on rank 0. A collective call.

    Returns:
        The bytes of all ranks on rank 0; None on the other ranks.
    """
    return _gather_bytes(content, None, 0)


def from_first_rank(value: Any) -> Any:
    """Broadcast rank 0's value, of JSON types, to all ranks; a collective call.

    Args:
        value: the value on rank 0; ignored on other ranks.
    """
    content = _encode(value) if dist.get_rank() == 0 else b""
    size = torch.tensor([len(content)], dtype=torch.int64, device=_device(None))
    dist.broadcast(size, 0)
    bytes_x = _to_tensor(content, int(size), size.device)
    dist.broadcast(bytes_x, 0)
    return json.loads(_from_tensor(bytes_x))


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _gather_bytes(content: bytes, group: dist.ProcessGroup | None, destination: int | None) -> list[bytes] | None:
    device, num_ranks = _device(group), dist.get_world_size(group)
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(num_ranks)]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(size) for size in sizes]
    own_bytes = _to_tensor(content, max(lengths), device)
    if destination is None or dist.get_rank(group) == destination:
        parts: list[Tensor] | None = [torch.empty_like(own_bytes) for _ in range(num_ranks)]
    else:
        parts = None
    if destination is None:
        dist.all_gather(parts, own_bytes, group=group)
    else:
        dist.gather(own_bytes, parts, destination, group=group)
    if parts is None:
        return None
    return [_from_tensor(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of a group's messages."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _to_tensor(content: bytes, length: int, device: torch.device) -> Tensor:
    """Return bytes as a tensor, uint8 [length], padded with zeros."""
    return torch.frombuffer(bytearray(content.ljust(max(length, 1), b"\0")), dtype=torch.uint8).to(device)


def _from_tensor(bytes_x: Tensor) -> bytes:
    return bytes_x.cpu().numpy().tobytes()


# --- errors ----------------------------------------------------------------------------------------------------------


def _error_to_json(error: UserError) -> tuple[str, list[str], list[str]]:
    """Return an error as JSON types: its class, the arguments of that class, and those of a plain `UserError`."""
    error_class, arguments = cast(tuple[type, tuple[str, ...]], error.__reduce__()[:2])
    return _class_name(error_class), list(arguments), [error.where, error.problem, error.hint]


def _error_from_json(name: str, arguments: list[str], fallback_arguments: list[str]) -> UserError:
    error_class = {_class_name(error_class): error_class for error_class in _error_classes(UserError)}.get(name)
    return UserError(*fallback_arguments) if error_class is None else error_class(*arguments)


def _class_name(error_class: type) -> str:
    return f"{error_class.__module__}.{error_class.__qualname__}"


def _error_classes(error_class: type[UserError]) -> Iterator[type[UserError]]:
    """Iterate over an error class and all its subclasses in imported modules."""
    yield error_class
    for subclass in error_class.__subclasses__():
        yield from _error_classes(subclass)
