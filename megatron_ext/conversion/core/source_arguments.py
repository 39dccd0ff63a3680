"""Common arguments of `selectron convert` and `selectron inspect` for the checkpoint to read."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.conversion.core.source import Source, SourceOptions


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for information that a checkpoint may lack."""
    config = "YAML file with the `model` section, if the checkpoint does not contain it"
    parser.add_argument("--model-config", type=Path, metavar="FILE", help=config)
    tokenizer = "tokenizer.json, if the checkpoint has none"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=tokenizer)


def parse_source_options(args: argparse.Namespace) -> SourceOptions:
    """Return the values of the options of `add_source_options`."""
    from megatron_ext.conversion.core.source import SourceOptions

    return SourceOptions(model_config=args.model_config, tokenizer=args.tokenizer)


def hide_gpus() -> None:
    """Hide all GPUs from this process.

    Call this function before megatron-core is imported, because that allocates tensors on visible GPUs.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def open_source_on_cpu(path: Path, args: argparse.Namespace) -> Source:
    """Open a checkpoint on the CPU.

    Args:
        path: folder of the checkpoint.
        args: parsed arguments, see `add_source_options`.

    Raises:
        UserError: the folder is no checkpoint, or is damaged.
    """
    hide_gpus()
    from megatron_ext.platform.device import prepare_megatron_import

    prepare_megatron_import()
    from megatron_ext.conversion.core.opening import open_source

    return open_source(path, parse_source_options(args))
