"""Options of `selectron bench prepare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kernels.bench.arguments import require_positive, save_into
from kernels.bench.cases import OptionError
from megatron_ext.utils.atomic_files import os_error_reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="FILE", help="a tokenizer.json")
    add("--input", type=Path, metavar="PATH", help="documents as for `selectron prepare` (random text)")
    add("--megabytes", type=float, default=20.0, metavar="MB", help="size of random text (%(default)s)")
    add("--megatron-lm", type=Path, metavar="DIR", help="checkout of Megatron-LM (omitted by default)")
    add("--workers", type=int, default=1, metavar="N", help="processes of each contestant (%(default)s)")
    add(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="rounds, in each of which every contestant runs once (%(default)s)",
    )
    add("--output", type=Path, default=Path("bench/prepare"), metavar="DIR", help="folder of the report (%(default)s)")
    add("--disk", type=Path, metavar="DIR", help="folder for temporary inputs and outputs (--output)")


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its table; return 0.

    Raises:
        OptionError: an option or the output folder is invalid.
        UserError: the input or the tokenizer cannot be read.
    """
    workers, rounds = require_positive("--workers", args.workers), require_positive("--rounds", args.rounds)
    if not args.megabytes > 0:
        raise OptionError("--megabytes", f"{args.megabytes} is not above 0", "give a positive number")
    if args.megatron_lm and not (args.megatron_lm / "tools" / "preprocess_data.py").is_file():
        raise OptionError(
            "--megatron-lm", f"{args.megatron_lm} has no tools/preprocess_data.py", "give a checkout of Megatron-LM"
        )
    import torch

    from kernels.bench.bench_report import describe_machine
    from megatron_ext.bench.checkpoints.report import host
    from megatron_ext.bench.prepare import run as prepare
    from megatron_ext.bench.prepare.input import input_texts, random_texts
    from megatron_ext.bench.prepare.report import PrepareReport

    disk = args.disk or args.output
    try:
        disk.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            "--disk", f"{disk} cannot be written ({os_error_reason(error)})", "choose another folder"
        ) from None
    texts = input_texts(args.input) if args.input else random_texts(round(args.megabytes * 1e6))
    rows = prepare.compare(texts, args.tokenizer, workers, rounds, disk, args.megatron_lm)
    data = f"`{args.input}`" if args.input else "Random text"
    unavailable = [] if args.megatron_lm else [f"{prepare.MEGATRON} (no `--megatron-lm`)"]
    machine = describe_machine(torch.device("cpu")) | host()
    report = PrepareReport(machine=machine, data=data, workers=workers, rounds=rounds, rows=rows, left_out=unavailable)
    save_into(args.output, report.write)
    print(report.markdown())
    return 0
