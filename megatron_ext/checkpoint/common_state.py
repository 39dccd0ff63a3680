"""Restricted reader of a torch_dist checkpoint's common state: the part that is the same on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.checkpoint.extent import RefusedPickle
from megatron_ext.checkpoint.metadata_file import read_metadata
from megatron_ext.checkpoint.metadata_index import DAMAGED_HINT
from megatron_ext.checkpoint.pickle_names import AllowedNames
from megatron_ext.checkpoint.torch_file import NAMES, load_file, load_range
from megatron_ext.utils.atomic_files import open_regular, os_error_reason
from megatron_ext.utils.errors import UserError

SHARDED_KEY = "common_state/shard_0_1"
"""Key under which megatron-core, since 0.19, stores the common state among the tensors: a list of one element."""


class CommonState(NamedTuple):
    """Common state of a checkpoint.

    Attributes:
        path: file that contains the state, for messages.
        value: the state as it was saved; a dictionary in undamaged checkpoints.
    """

    path: Path
    value: Any


def read_common_state(folder: Path, names: AllowedNames | None = None, metadata: Metadata | None = None) -> CommonState:
    """Read the common state without running code from its file.

    Selectron, and megatron-core before 0.19, write the common state to `common.pt`. Where that file is missing, the
    index of the checkpoint tells which file contains the state.

    Args:
        folder: folder of the checkpoint.
        names: classes that the file may name, besides plain values and tensors.
        metadata: index of the checkpoint; None: it is read if it is needed.

    Raises:
        UserError: there is no such state, or it cannot be read under this restriction.
    """
    allowed = NAMES if names is None else {**NAMES, **names}
    path = folder / COMMON_STATE_FNAME
    location = None if os.path.lexists(path) else _location(read_metadata(folder) if metadata is None else metadata)
    try:
        if location is None:
            return CommonState(path, load_file(path, allowed))
        path = folder / location.relative_path
        return CommonState(path, _load_only_element(path, location, allowed))
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", DAMAGED_HINT) from error
    except RefusedPickle as error:
        raise UserError(str(path), f"cannot be read: it {error}", DAMAGED_HINT) from error


def _location(metadata: Metadata) -> Any:
    """Return file and byte range of the common state among the tensors; None: the index does not contain it."""
    return next((location for index, location in metadata.storage_data.items() if index.fqn == SHARDED_KEY), None)


def _load_only_element(path: Path, location: Any, names: AllowedNames) -> Any:
    """Load a list of one element from a byte range, and return the element."""
    descriptor = open_regular(path)
    try:
        values = load_range(descriptor, location.offset, location.length, names)
    finally:
        os.close(descriptor)
    if not isinstance(values, list) or len(values) != 1:
        raise RefusedPickle("contains no common state where the index names it")
    return values[0]
