"""Restricted reader of the state that is the same on all ranks of a torch_dist checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron_ext.checkpoint.extent import RefusedPickle
from megatron_ext.checkpoint.metadata_file import read_metadata
from megatron_ext.checkpoint.metadata_index import DAMAGED_HINT
from megatron_ext.checkpoint.pickle_names import AllowedNames
from megatron_ext.checkpoint.torch_file import NAMES, load_file, load_range
from megatron_ext.utils.atomic_files import open_regular, os_error_reason
from megatron_ext.utils.errors import UserError

SHARDED_KEY = "common_state/shard_0_1"
"""Key under which megatron-core stores the common state with the tensors since 0.19, as a list of one element."""


class CommonState(NamedTuple):
    """Common state of a checkpoint.

    Attributes:
        path: file that contains it, for messages.
        value: the state.
    """

    path: Path
    value: Any


def read_common(folder: Path, names: AllowedNames | None = None) -> CommonState:
    """Read the state that is the same on all ranks, without running code from the file.

    megatron-core before 0.19, and Selectron, write it into `common.pt`. If that file is missing, it is looked up in the
    checkpoint's index.

    Args:
        folder: folder of the checkpoint.
        names: classes that the file may name, besides plain values and tensors.

    Raises:
        UserError: there is no such state, or it cannot be read under this restriction.
    """
    allowed = NAMES if names is None else {**NAMES, **names}
    path = folder / COMMON_STATE_FNAME
    location = None if os.path.lexists(path) else _sharded_location(folder)
    try:
        if location is None:
            return CommonState(path, load_file(path, allowed))
        path = folder / location.relative_path
        return CommonState(path, _load_only_element(path, location, allowed))
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", DAMAGED_HINT) from error
    except RefusedPickle as error:
        raise UserError(str(path), f"cannot be read: it {error}", DAMAGED_HINT) from error


def _sharded_location(folder: Path) -> Any:
    """Return the place of the common state among the tensors; None if the index has none."""
    storage_data = read_metadata(folder).storage_data
    return next((place for index, place in storage_data.items() if index.fqn == SHARDED_KEY), None)


def _load_only_element(path: Path, location: Any, names: AllowedNames) -> Any:
    descriptor = open_regular(path)
    try:
        values = load_range(descriptor, location.offset, location.length, names)
    finally:
        os.close(descriptor)
    if not isinstance(values, list) or len(values) != 1:
        raise RefusedPickle("contains no common state where the index names it")
    return values[0]
