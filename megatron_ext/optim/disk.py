"""Checks of DeepSpeed's offloading to a local disk (NVMe), before DeepSpeed would fail with assertions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig

from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError


def check_disk(sections: Mapping[str, Mapping[str, Any]], chunk: torch.nn.Module, data_parallel_size: int) -> None:
    """Check that offloading to a disk can work here.

    Args:
        sections: sections of DeepSpeed's `zero_optimization` that offload to a disk, by name; may be empty.
        chunk: the model, not yet sharded.
        data_parallel_size: number of ranks that a parameter is sharded over.

    Raises:
        UserError: the folder cannot be written to, a buffer is too small, or DeepSpeed cannot build its operator.
    """
    for name, section in sections.items():
        _check_folder(Path(section["nvme_path"]), f"zero_optimization.{name}.nvme_path")
    if sections and not AsyncIOBuilder().is_compatible(verbose=False):
        where = f"zero_optimization.{next(iter(sections))}"
        hint = "install libaio's development files and a C++ compiler (Debian: libaio-dev, g++)"
        raise UserError(where, "DeepSpeed cannot build its operator async_io", hint)
    if "offload_param" in sections:
        buffer = DeepSpeedZeroOffloadParamConfig(**sections["offload_param"]).buffer_size
        _check_buffer(buffer, chunk, data_parallel_size)


def _check_folder(folder: Path, where: str) -> None:
    hint = "name a folder on a local disk"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(where, f"{folder} cannot be created ({os_error_reason(error)})", hint) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(where, f"{folder} cannot be written to", hint)


def _check_buffer(buffer_size: int, chunk: torch.nn.Module, data_parallel_size: int) -> None:
    """Check that the buffer holds a rank's shard of the largest parameter; sizes are numbers of elements."""
    name, parameter = max(chunk.named_parameters(), key=lambda entry: entry[1].numel())
    shard_size = -(-parameter.numel() // data_parallel_size)
    if buffer_size < shard_size:
        problem = f"{buffer_size:,} is less than the {shard_size:,} elements that a rank has of {name}"
        raise UserError("zero_optimization.offload_param.buffer_size", problem, f"set it to {shard_size} or more")
