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
    "kernels": (kernels, "attention ops: ours and those of other libraries"),
    "layers": (layers, "the mixer of one layer: ours and that of flash-linear-attention"),
    "train": (train, "full training steps of variants of a configuration: tokens/s, MFU, memory, time of each part"),
    "checkpoints": (
        checkpoints,
        "training time lost to a checkpoint, and the speed of saving and loading it",
    ),
    "optimizers": (optimizers, "training steps with different optimizers, alternating in the same processes"),
    "loader": (loader, "read throughput of prepared data, and the time to the first batch after a resume"),
    "prepare": (prepare, "tokenisation throughput, compared with the bare tokenizer, datatrove and Megatron-LM"),
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
        exit_code: int = args.measure(args)
    except OptionError as error:
        raise UserError(error.where, error.problem, error.hint) from None
    return exit_code
