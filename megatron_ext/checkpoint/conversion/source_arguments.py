"""What `selectron convert` and `selectron inspect` are told of the checkpoint they read, and opening it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.checkpoint.conversion.source import Source, SourceOptions


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a user can say of a checkpoint that does not say it itself."""
    config = "YAML file with the `model` section, where the checkpoint does not tell it"
    parser.add_argument("--model-config", type=Path, metavar="FILE", help=config)
    tokenizer = "tokenizer.json, where the checkpoint has none"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=tokenizer)


def asked_options(args: argparse.Namespace) -> SourceOptions:
    """What the user said; see `add_source_options`."""
    from megatron_ext.checkpoint.conversion.source import SourceOptions

    return SourceOptions(model_config=args.model_config, tokenizer=args.tokenizer)


def on_the_cpu() -> None:
    """To be called before megatron-core may be imported: it puts tensors on the GPU it sees."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def open_asked(path: Path, args: argparse.Namespace) -> Source:
    """The checkpoint, on the CPU.

    Args:
        path: its folder.
        args: see `add_source_options`.

    Raises:
        UserError: it is none, or damaged.
    """
    on_the_cpu()
    from megatron_ext.platform import before_megatron

    before_megatron()
    from megatron_ext.checkpoint.conversion.opening import open_source

    return open_source(path, asked_options(args))
