"""What `selectron convert` and `selectron inspect` are told of the checkpoint they read, and opening it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.checkpoint.conversion.source import Source


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a user can say of a checkpoint that does not say it itself."""
    config = "YAML file with the `model` section, where the checkpoint does not tell it"
    parser.add_argument("--model-config", type=Path, metavar="FILE", help=config)
    tokenizer = "tokenizer.json, where the checkpoint has none"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=tokenizer)


def open_asked(path: Path, args: argparse.Namespace) -> Source:
    """The checkpoint, on the CPU: megatron-core puts its tensors on the GPU it sees.

    Args:
        path: its folder.
        args: see `add_source_options`.

    Raises:
        UserError: it is none, or damaged.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_ext.platform import before_megatron

    before_megatron()
    from megatron_ext.checkpoint.conversion.opening import open_source
    from megatron_ext.checkpoint.conversion.source import SourceOptions

    return open_source(path, SourceOptions(model_config=args.model_config, tokenizer=args.tokenizer))
