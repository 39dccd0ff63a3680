"""Options and output of `selectron plan`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.commands import run_config
from megatron_ext.planning.gpus import GPUS, MEASURED_GPU, find_gpu
from megatron_ext.utils.errors import UserError

DEFAULT_VOCABULARY = 50304


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration and the options."""
    run_config.add_config(parser)
    add = parser.add_argument
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default %(default)s)")
    add("--gpus-per-node", type=int, default=8, metavar="M", help="GPUs per node (default %(default)s)")
    add("--gpu", default=MEASURED_GPU, metavar="KIND", help=f"kind of GPU: {', '.join(GPUS)} (default %(default)s)")
    vocabulary = f"vocabulary size (default: that of the prepared data, or {DEFAULT_VOCABULARY} without data)"
    add("--vocabulary", type=int, metavar="N", help=vocabulary)
    add("--tokens", type=float, metavar="N", help="training tokens, e.g. 100e9 (default: those of training.steps)")
    add(
        "--price",
        type=float,
        metavar="P",
        help="price of a GPU hour, in any currency, to compute the cost of the tokens",
    )
    add(
        "--search",
        type=int,
        nargs="?",
        const=10,
        metavar="N",
        help="compare all layouts and show the N best (default 10)",
    )
    add("--every-rank", action="store_true", help="build the model shard of every rank and report their parameters")
    add("--output", type=Path, metavar="DIR", help="folder to which plan.json and plan.md are also written")


def run(args: argparse.Namespace) -> int:
    """Plan a configuration and print the report.

    Args:
        args: parsed arguments, see `add_arguments`.

    Returns:
        0; 1 if the layout does not fit, or with --search no layout fits.

    Raises:
        UserError: an option or the configuration is invalid.
    """
    _check(args)
    from megatron_ext.config.rules import check
    from megatron_ext.planning import plan
    from megatron_ext.planning.batch import batch_for_replica_per_node, divisible_batch
    from megatron_ext.planning.plan_report import PlanReport

    configured, mixers = run_config.load(args.config, args.overrides), run_config.mixers()
    machine = plan.Machine(gpu=find_gpu(args.gpu), nodes=args.nodes, per_node=args.gpus_per_node)
    config = divisible_batch(configured, machine.world_size) if args.search is None else configured
    vocab_size, vocabulary = _vocabulary(args, config.data.path, config.data.cache_dir)
    report = PlanReport(
        name=args.config.stem,
        overrides=tuple(args.overrides),
        machine=machine,
        vocabulary=vocabulary,
        tokens=args.tokens
        or configured.training.steps * configured.training.global_batch_size * config.data.seq_length,
        price=args.price,
    )
    if args.search is None:
        report.planned = plan.plan(config, vocab_size, machine, mixers)
    else:
        report.shown = args.search
        report.layouts = plan.search(config, vocab_size, machine, mixers, _print_progress)
        if not any(layout.memory for layout in report.layouts):
            config = batch_for_replica_per_node(configured, machine)
            report.layouts = plan.search(config, vocab_size, machine, mixers, _print_progress)
    if config is not configured:
        report.batch = configured.training.global_batch_size, config.training.global_batch_size
    if args.every_rank:
        check(config, machine.world_size, mixers)
        report.shards = list(plan.shards(config, vocab_size, machine.world_size))
    print(report.markdown())
    if args.output is not None:
        report.write(args.output)
        print(f"written: {args.output}")
    return 0 if report.fits else 1


def _check(args: argparse.Namespace) -> None:
    for name in ("nodes", "gpus_per_node", "vocabulary", "search"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}", f"{value} is less than 1", "give 1 or more")
    for name in ("tokens", "price"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name}", f"{value} is not a finite number above 0", "give one")
    find_gpu(args.gpu)
    if args.search is not None and args.every_rank:
        raise UserError(
            "--every-rank", "cannot be combined with --search, which has many layouts", "choose a layout first"
        )
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise UserError("--output", f"{args.output} is not a folder", "give another path")


def _vocabulary(args: argparse.Namespace, path: str, cache_dir: str | None) -> tuple[int, str]:
    """Return the vocabulary size and a description of its origin."""
    if args.vocabulary is not None:
        return args.vocabulary, f"{args.vocabulary:,} tokens (--vocabulary)"
    from megatron_ext.planning.vocabulary import vocab_size

    try:
        size = vocab_size(path, cache_dir)
    except UserError:
        origin = f"because {path} has no prepared data (set it with --vocabulary)"
        return DEFAULT_VOCABULARY, f"{DEFAULT_VOCABULARY:,} tokens, {origin}"
    return size, f"{size:,} tokens, from {path}"


def _print_progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
