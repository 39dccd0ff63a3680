"""Warnings of libraries that come with every run and that no user can mend, silenced by their text."""

from __future__ import annotations

import warnings


def hush_libraries() -> None:
    """Leave out what libraries say on every run and no user can mend; `selectron doctor` tells what matters."""
    for message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"full scope is deprecated",  # a default of megatron-core's own
        r"The \.grad attribute of a Tensor that is not a leaf",  # Megatron looks at shards of parameters
        r"`torch\.distributed\.\w+` is deprecated",
        r"`load_state_dict` is deprecated",  # Megatron loads checkpoints with it
        r"Detected a Jax installation but could not find the shared object file for the Transformer Engine Jax",
        r"Triton is not supported on current platform",  # flash-linear-attention's, on a CPU
        r"Warning: Profiler clears events at the end of each cycle",  # there is one cycle
        r"When using sequence parallelism it is recommended to set",  # on the CPU there are no connections to limit
    ):
        warnings.filterwarnings("ignore", message=message)
