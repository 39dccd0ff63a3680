"""Versions of libraries with which the tests were run."""

from __future__ import annotations

TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
    "megatron-core": ("0.16", "0.19"),
    "deepspeed": ("0.19",),
    "transformer-engine": ("2.11",),
    "triton": ("3.6", "3.7"),
    "flash-linear-attention": ("0.6",),
}
"""Release series, major.minor, by distribution name."""


def untested_note(name: str, version: str) -> str | None:
    """Return a note for a version whose series was not tested, None for a tested one or an unknown distribution."""
    series = ".".join(version.split("+")[0].split(".")[:2])
    tested = TESTED.get(name)
    if tested is None or series in tested:
        return None
    return f"not tested; tested with {' and '.join(tested)}"
