"""Messages printed once, by the first rank."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist


def print_on_first_rank(line: str) -> None:
    """Print a line to standard error on the first rank."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        print(line, file=sys.stderr)
