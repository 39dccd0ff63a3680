"""Suppression of messages that libraries print on every run. Other messages are shown."""

from __future__ import annotations

import warnings

import pytest

from megatron_ext.commands.quiet import ignore_library_warnings

SILENCED = [
    "Detected a Jax installation but could not find the shared object file for the Transformer Engine Jax extension "
    "library. If this is not intentional, please reinstall Transformer Engine",
    "Triton is not supported on current platform, roll back to CPU.",
    "Warning: Profiler clears events at the end of each cycle. Only events from last cycle will be reported.",
    "Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
]
SHOWN = [
    "Detected a PyTorch installation but could not find the shared object file for the Transformer Engine PyTorch",
    "Triton is older than what is asked for",
    "lr_scheduler.step() was called before optimizer.step()",
]


@pytest.mark.parametrize("text", [*SILENCED, *SHOWN])
def test_libraries_are_silenced_by_name(text: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ignore_library_warnings()
        warnings.warn(text, RuntimeWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == [text] * (text in SHOWN)
