"""Implementation of `selectron inspect`: describe a checkpoint and the formats that it can be converted to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.conversion.core.source_arguments import (
    add_source_options,
    hide_gpus,
    open_source_on_cpu,
    parse_source_options,
)
from megatron_ext.utils.errors import EXIT_USER_ERROR, UserError

if TYPE_CHECKING:
    from megatron_ext.conversion.core.source import Source

_FORMATS = {
    "selectron": "a run's checkpoint (Megatron torch_dist)",
    "hugging_face": "Hugging Face safetensors",
    "megatron_core": "a GPTModel of megatron-core (Megatron torch_dist)",
    "deepspeed_universal": "DeepSpeed's universal checkpoint",
}
_ARCHITECTURES = {"selectron": "Selectron", "megatron_core": "GPTModel", "deepspeed_universal": "Selectron"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `selectron inspect`."""
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a run, a checkpoint or a model")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its shape and data type")
    parser.add_argument("--json", action="store_true", help="print JSON")
    shapes = "also build the model without weights and compare every tensor's shape with it (takes seconds)"
    parser.add_argument("--shapes", action="store_true", help=shapes)
    add_source_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print a description of a checkpoint.

    Args:
        args: parsed arguments, see `add_arguments`.

    Returns:
        The exit code.

    Raises:
        UserError: the folder is no checkpoint or is damaged. With `--json` the problem is printed instead.
    """
    from megatron_ext.conversion.core.inspection import inspect_folder

    hide_gpus()
    try:
        source = None if args.shapes else inspect_folder(args.path, parse_source_options(args))
        with_shapes = source is None
        facts = describe(
            source or open_source_on_cpu(args.path, args), with_tensors=args.tensors, with_shapes=with_shapes
        )
    except UserError as error:
        if not args.json:
            raise
        print(json.dumps({"path": str(args.path), "whole": False, "problem": str(error)}, indent=2))
        return EXIT_USER_ERROR
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for line in _lines(facts):
        print(line)
    return 0


def describe(source: Source, *, with_tensors: bool, with_shapes: bool) -> dict[str, Any]:
    """Return a description of a checkpoint as plain values.

    The value of `whole` is always true, because a damaged checkpoint cannot be opened.

    Args:
        source: the checkpoint.
        with_tensors: whether to list each tensor.
        with_shapes: whether the shapes have been compared with those of the model.
    """
    saved, progress = source.saved, source.progress
    facts: dict[str, Any] = {
        "path": str(source.path),
        "format": source.format,
        "architecture": source.family.architecture if source.family else _ARCHITECTURES[source.format],
        "whole": True,
        "shapes_compared": with_shapes,
        "step": progress.step if progress else None,
        "tokens": progress.tokens if progress else None,
        "pattern": saved.model.pattern,
        "layers": len(saved.layers),
        "hidden_size": saved.model.hidden_size,
        "vocab_size": saved.vocab_size,
        "parameters": source.tensors.num_elements,
        "dtype": str(source.dtype).removeprefix("torch."),
        "bytes": source.stored.num_bytes,
        "optimizer_state": source.has_optimizer,
        "tokenizer": str(source.tokenizer.file) if source.tokenizer else None,
        "to": _conversion_obstacles(source),
    }
    if with_tensors:
        infos = source.stored.infos().items()
        facts["tensors"] = {
            key: {"shape": list(info.shape), "dtype": str(info.dtype).removeprefix("torch.")} for key, info in infos
        }
    return facts


def _conversion_obstacles(source: Source) -> dict[str, str | None]:
    """Return for each format why the model cannot be converted to it; None: it can."""
    from megatron_ext.conversion.core.destination import DESTINATIONS, WriteOptions

    reasons: dict[str, str | None] = {}
    for name, destination in DESTINATIONS.items():
        try:
            destination.check(source, WriteOptions())
            reasons[name] = None
        except UserError as error:
            reasons[name] = error.problem
    return reasons


def _lines(facts: dict[str, Any]) -> list[str]:
    progress = "unknown" if facts["step"] is None else f"{facts['step']:,} ({facts['tokens']:,} tokens)"
    shapes = "" if facts["shapes_compared"] else " (checked by name; --shapes also checks shapes)"
    rows: dict[str, str] = {
        "format": _FORMATS[facts["format"]],
        "architecture": facts["architecture"],
        "files": f"complete, with all tensors of the configuration{shapes}",
        "step": progress,
        "pattern": f"{facts['pattern']} ({facts['layers']} layers)",
        "hidden size": f"{facts['hidden_size']:,}",
        "vocabulary": f"{facts['vocab_size']:,}",
        "parameters": f"{facts['parameters']:,} ({facts['dtype']}, {facts['bytes'] / 1e6:,.1f} MB)",
        "optimizer": "present" if facts["optimizer_state"] else "absent",
        "tokenizer": facts["tokenizer"] or "absent",
    }
    rows |= {f"--to {name}": "possible" if reason is None else f"no: {reason}" for name, reason in facts["to"].items()}
    lines = [f"{name:<26}{value}" for name, value in rows.items()]
    for key, info in facts.get("tensors", {}).items():
        lines.append(f"{key}  {info['shape']} {info['dtype']}")
    return lines
