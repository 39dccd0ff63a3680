"""What `selectron convert` does: read one checkpoint, write another, show that they are the same model."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.checkpoint.disk import is_full, storage_problem
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    import torch

    from megatron_ext.checkpoint.conversion.destination import Destination, Wish
    from megatron_ext.checkpoint.conversion.source import Source, SourceOptions

FORMATS = ("hf", "megatron", "deepspeed-universal")
PRECISIONS = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="SOURCE",
        help="run, checkpoint, Hugging Face folder, DeepSpeed universal or plain Megatron checkpoint",
    )
    add("destination", type=Path, metavar="DESTINATION", help="folder to write")
    add("--to", required=True, choices=FORMATS, help="format to write")
    add("--dtype", choices=PRECISIONS, help="type of the numbers (default: as they are)")
    check = "compare every tensor, and the logits of both models, before the folder appears (default: yes)"
    add("--architecture", metavar="NAME", help="of --to hf (default: the first of other libraries' that fits, or ours)")
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help=check)
    add("--dry-run", action="store_true", help="say what would be written, and write nothing")
    add("--overwrite", action="store_true", help="replace a model that is there")
    add("--shard-size", type=float, default=5, metavar="GB", help="of a safetensors file, at most (default: 5)")
    add_source_options(parser)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a user can say of a checkpoint that does not say it itself."""
    config = "YAML file with the `model` section, where the checkpoint does not tell it"
    parser.add_argument("--model-config", type=Path, metavar="FILE", help=config)
    tokenizer = "tokenizer.json, where the checkpoint has none"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=tokenizer)


def source_options(args: argparse.Namespace) -> SourceOptions:
    """What the user said of the checkpoint."""
    from megatron_ext.checkpoint.conversion.source import SourceOptions

    return SourceOptions(model_config=args.model_config, tokenizer=args.tokenizer)


def run(args: argparse.Namespace) -> int:
    """Convert.

    Args:
        args: see `add_arguments`.

    Returns:
        The exit code.

    Raises:
        UserError: the source is at fault, cannot be written so, or the disk refuses; nothing is left behind.
    """
    if not args.shard_size > 0:
        raise UserError("--shard-size", f"{args.shard_size:g} is not above 0", "give gigabytes")
    _check_destination(args.source, args.destination, args.overwrite)
    hide_gpus()
    from megatron_ext.checkpoint.conversion.destination import DESTINATIONS, Wish
    from megatron_ext.checkpoint.conversion.opening import open_source

    source, destination = open_source(args.source, source_options(args)), DESTINATIONS[args.to]
    wish = Wish(
        dtype=_dtype(args.dtype),
        shard_bytes=int(args.shard_size * 10**9),
        name=args.destination.name,
        architecture=args.architecture,
    )
    destination.check(source, wish)
    files = destination.files(source, wish)
    for name, size in files.items():
        print(f"{args.destination / name}  {size / 1e6:,.1f} MB")
    if not args.dry_run:
        _check_space(args.destination, sum(files.values()))
        _convert(source, destination, wish, args)
    return 0


def hide_gpus() -> None:
    """Conversion is of one process on the CPU, and megatron-core puts its tensors on the GPU it sees."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    names = dict(zip(PRECISIONS, (torch.float32, torch.bfloat16, torch.float16), strict=True))
    return None if name is None else names[name]


def _check_destination(source: Path, destination: Path, overwrite: bool) -> None:
    ours, theirs = source.resolve(), destination.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise UserError("DESTINATION", f"{destination} and SOURCE lie in each other", "give another folder")
    if destination.exists() and not overwrite:
        raise UserError("DESTINATION", f"{destination} is there", "give another folder, or add --overwrite")
    if destination.exists() and not _is_model(destination):
        raise UserError("DESTINATION", f"{destination} holds no model to overwrite", "give another folder")


def _is_model(folder: Path) -> bool:
    """Whether a folder is an empty one or what a conversion writes: nothing else is ever removed."""
    return folder.is_dir() and (
        not any(folder.iterdir())
        or any((folder / name).exists() for name in ("config.json", "checkpoints", "latest_universal"))
    )


def _check_space(destination: Path, needed: int) -> None:
    there = next(path for path in destination.absolute().parents if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        problem = f"needs {needed / 1e6:,.1f} MB, and {there} has {free / 1e6:,.1f} MB left"
        raise UserError("DESTINATION", problem, "make room, or give a folder on another disk")


def _convert(source: Source, destination: Destination, wish: Wish, args: argparse.Namespace) -> None:
    from megatron_ext.checkpoint.conversion.opening import open_source
    from megatron_ext.checkpoint.conversion.source import SourceOptions
    from megatron_ext.checkpoint.conversion.verify import verify

    with _beside(args.destination) as partial:
        destination.write(source, wish, partial)
        if args.verify:
            written, training = open_source(partial, SourceOptions()), destination.carries_training(source, wish)
            print(verify(source, written, wish.dtype, with_training=training), file=sys.stderr)
    if (remark := destination.remark(source, wish)) is not None:
        print(remark, file=sys.stderr)
    if source.tokenizer is None:
        print("no tokenizer is there to be copied; --tokenizer FILE gives one", file=sys.stderr)


@contextmanager
def _beside(destination: Path) -> Iterator[Path]:
    """A folder that takes the destination's place when all went well, and is removed when not.

    Raises:
        UserError: the disk refuses.
    """
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        _replace(partial, destination)
    except BaseException as error:
        problem = os.strerror(errno.ENOSPC) if is_full(destination.parent) else storage_problem(error)
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, UserError) or problem is None:
            raise
        mend = "make room, or give a folder that can be written"
        raise UserError(str(destination), f"cannot be written: {problem}", mend) from error


def _replace(partial: Path, destination: Path) -> None:
    from megatron_ext.files import force_to_disk

    for path in partial.rglob("*"):
        force_to_disk(path)
    if destination.exists():
        old = destination.with_name(f".{destination.name}.old")
        destination.rename(old)
        partial.rename(destination)
        shutil.rmtree(old)
    else:
        partial.rename(destination)
    force_to_disk(destination.parent)
