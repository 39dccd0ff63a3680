"""Implementation of `selectron convert`: read a checkpoint, write another one, and verify that the models are equal."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.conversion.core.output_folder import atomic_folder, check_destination, check_space
from megatron_ext.conversion.core.source_arguments import add_source_options, open_source_on_cpu
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    import torch

    from megatron_ext.conversion.core.destination import Destination, WriteOptions
    from megatron_ext.conversion.core.source import Source

FORMATS = ("hf", "megatron", "deepspeed-universal")
PRECISIONS = ("fp32", "bf16", "fp16")
SHARD_SIZE = 5.0
"""Default maximum size of a safetensors file in gigabytes (10^9 bytes)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `selectron convert`."""
    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="SOURCE",
        help="run, checkpoint, Hugging Face folder, DeepSpeed universal or plain Megatron checkpoint",
    )
    add("destination", type=Path, metavar="DESTINATION", help="folder to write")
    add("--to", required=True, choices=FORMATS, help="format to write")
    add("--dtype", choices=PRECISIONS, help="data type of the tensors (default: unchanged)")
    verify = "compare every tensor, and the logits of both models, before the destination appears (default: yes)"
    add(
        "--architecture",
        metavar="NAME",
        help="architecture for --to hf (default: the first matching one of another library, else ours)",
    )
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)
    add("--dry-run", action="store_true", help="list the files without writing them")
    add("--overwrite", action="store_true", help="replace an existing model")
    shard_size = f"maximum size of a safetensors file for --to hf (default: {SHARD_SIZE:g})"
    add("--shard-size", type=float, metavar="GB", help=shard_size)
    add_source_options(parser)


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint as the arguments specify.

    Args:
        args: parsed arguments, see `add_arguments`.

    Returns:
        The exit code.

    Raises:
        UserError: the source is invalid or cannot be written in this format, or writing fails. No files are left
            behind.
    """
    _check_options(args)
    check_destination(args.source, args.destination, overwrite=args.overwrite)
    source = open_source_on_cpu(args.source, args)
    from megatron_ext.conversion.core.destination import DESTINATIONS, WriteOptions

    destination = DESTINATIONS[args.to]
    options = WriteOptions(
        dtype=_dtype(args.dtype),
        shard_bytes=int((args.shard_size or SHARD_SIZE) * 10**9),
        name=args.destination.resolve().name,
        architecture=args.architecture,
    )
    destination.check(source, options)
    files = destination.files(source, options)
    for name, size in files.items():
        print(f"{args.destination / name}  {size / 1e6:,.1f} MB")
    if not args.dry_run:
        check_space(args.destination, sum(files.values()))
        _convert(source, destination, options, args)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if args.shard_size is not None and not 0 < args.shard_size < math.inf:
        raise UserError("--shard-size", f"{args.shard_size:g} is not above 0", "give a size in GB")
    for name in ("architecture", "shard_size"):
        if args.to != "hf" and getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise UserError(option, f"{getattr(args, name)} has no effect with --to {args.to}", "omit the option")


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    names = dict(zip(PRECISIONS, (torch.float32, torch.bfloat16, torch.float16), strict=True))
    return None if name is None else names[name]


def _convert(source: Source, destination: Destination, options: WriteOptions, args: argparse.Namespace) -> None:
    from megatron_ext.conversion.core.opening import open_source
    from megatron_ext.conversion.core.source import SourceOptions
    from megatron_ext.conversion.core.verify import verify

    with atomic_folder(args.destination) as partial:
        destination.write(source, options, partial)
        if args.verify:
            written, training = open_source(partial, SourceOptions()), destination.includes_training(source, options)
            print(verify(source, written, options.dtype, compare_optimizer=training), file=sys.stderr)
    if (note := destination.note(source, options)) is not None:
        print(note, file=sys.stderr)
    if source.tokenizer is None:
        print("the source has no tokenizer to copy; add one with --tokenizer FILE", file=sys.stderr)
