"""Versions of libraries with which the tests were run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Releases:
    """Releases that were run, in ascending order.

    Attributes:
        cpu: releases with which the CPU tests passed. Empty for a library that needs a GPU.
        gpu: releases that were run on a GPU.
    """

    cpu: tuple[str, ...]
    gpu: tuple[str, ...]


TESTED: dict[str, Releases] = {
    "python": Releases(cpu=("3.11.7", "3.12.3", "3.13.0"), gpu=("3.12.3",)),
    "torch": Releases(cpu=("2.11.0", "2.13.0", "2.14.1"), gpu=("2.11.0",)),
    "megatron-core": Releases(cpu=("0.16.1", "0.19.2"), gpu=("0.16.1", "0.19.2")),
    "deepspeed": Releases(cpu=("0.19.8",), gpu=("0.19.8",)),
    "transformer-engine": Releases(cpu=(), gpu=("2.11.0",)),
    "triton": Releases(cpu=("3.6.0", "3.7.1", "3.8.0"), gpu=("3.6.0", "3.7.1")),
    "flash-linear-attention": Releases(cpu=("0.6.0",), gpu=("0.6.0",)),
}
"""Releases releases by distribution name. `docs/versions.md` says what was run with each."""


def untested_note(name: str, version: str) -> str | None:
    """Return a note for a version that was not tested, or not on a GPU.

    Patch releases of Python count as one. The result is None for a tested version and for an unknown distribution.
    """
    tested = TESTED.get(name)
    if tested is None:
        return None
    cpu, gpu = (any(_same(name, version, release) for release in of) for of in (tested.cpu, tested.gpu))
    if gpu and (cpu or not tested.cpu):
        return None
    if cpu:
        return f"tested without a GPU; with one: {_listed(tested.gpu)}"
    if gpu:
        return f"tested with a GPU; without one: {_listed(tested.cpu)}"
    return f"not tested; tested with {_listed(tested.cpu or tested.gpu)}"


def _same(name: str, version: str, release: str) -> bool:
    """Return True if a version, perhaps with a local part such as +cu130, is the release."""
    parts, expected = version.split("+")[0].split("."), release.split(".")
    return parts[:2] == expected[:2] if name == "python" else parts == expected


def _listed(releases: Sequence[str]) -> str:
    *others, last = releases
    return f"{', '.join(others)} and {last}" if others else last
