"""Filters for library warnings that appear in every run and that users cannot fix."""

from __future__ import annotations

import warnings

from megatron_ext.platform.megatron_versions import ignore_log_messages


def ignore_library_warnings() -> None:
    """Ignore library warnings that appear in every run and that users cannot fix.

    `selectron doctor` reports the relevant facts.
    """
    for message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"full scope is deprecated",  # caused by a default of megatron-core
        r"MimoModelConfig is experimental",  # megatron-core 0.19 imports it with its optimizers
        r"The \.grad attribute of a Tensor that is not a leaf",  # Megatron accesses `.grad` of parameter shards
        r"`torch\.distributed\.\w+` is deprecated",
        r"`load_state_dict` is deprecated",  # Megatron loads checkpoints with it
        r"Detected a Jax installation but could not find the shared object file for the Transformer Engine Jax",
        r"Triton is not supported on current platform",  # from flash-linear-attention on a CPU
        r"Warning: Profiler clears events at the end of each cycle",  # we use a single cycle
        r"When using sequence parallelism it is recommended to set",  # on the CPU there are no connections to limit
    ):
        warnings.filterwarnings("ignore", message=message)
    ignore_log_messages()
