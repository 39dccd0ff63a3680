"""Implementation of `selectron bench`: benchmarks of kernels, layers, training, checkpoints, optimizers and data."""

from __future__ import annotations

import argparse

from kernels.bench import options as kernels
from kernels.bench.cases import OptionError
from megatron_ext.bench.checkpoints import options as checkpoints
from megatron_ext.bench.layers import options as layers
from megatron_ext.bench.loader import options as loader
from megatron_ext.bench.optimizers import options as optimizers
from megatron_ext.bench.prepare import options as prepare
from megatron_ext.bench.train import options as train
from megatron_ext.utils.errors import UserError

SUBJECTS = {
    "kernels": (kernels, "our attention ops and their peers"),
    "layers": (layers, "one layer's mixer, ours and flash-linear-attention's"),
    "train": (train, "full training steps of a configuration's variants: tokens/s, MFU, memory, parts of a step"),
    "checkpoints": (
        checkpoints,
        "what a checkpoint costs training, and how fast it is saved and loaded",
    ),
    "optimizers": (optimizers, "a training step under one optimizer and another, in turn in the same processes"),
    "loader": (loader, "how fast batches of prepared data are read, and how soon a resumed run has its first"),
    "prepare": (prepare, "how fast text becomes tokens, beside the bare tokenizer, datatrove and Megatron-LM"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subjects, each with its own options."""
    subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    for name, (options, text) in SUBJECTS.items():
        subject = subjects.add_parser(name, help=text, description=text, allow_abbrev=False)
        options.add_arguments(subject)
        subject.set_defaults(measure=options.run)
    train.add_rank(subjects.add_parser("train-rank"))  # started by `train`; hidden, as it has no help


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print it.

    Args:
        args: see `add_arguments`.

    Returns:
        0, or 1 if a result of ours was wrong.

    Raises:
        UserError: an option, the output folder or the machine is unsuitable.
    """
    try:
        measured: int = args.measure(args)
    except OptionError as error:
        raise UserError(error.where, error.problem, error.hint) from None
    return measured
