"""Options of `selectron bench loader`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kernels.bench.arguments import print_progress, require_positive, save_into, split_list
from kernels.bench.cases import OptionError
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.temp_dirs import scratch_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="prepared data folder (temporary random data)")
    add("--shards", default="10,100,1000", metavar="LIST", help="numbers of shards of random data (%(default)s)")
    add("--shard-tokens", type=int, default=1_000_000, metavar="N", help="tokens per random shard (%(default)s)")
    add("--lengths", default="2048,102400", metavar="LIST", help="tokens per sample (%(default)s)")
    add("--batch-tokens", type=int, default=8192, metavar="N", help="approximate tokens per micro-batch (%(default)s)")
    add("--ranks", default="1,2", metavar="LIST", help="numbers of concurrent processes (%(default)s)")
    add("--samples", default="0,32000000", metavar="LIST", help="samples to resume at (%(default)s: 10^6 steps of 32)")
    add(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="reading time per row, and per folder in alternation (%(default)s)",
    )
    add("--output", type=Path, default=Path("bench/loader"), metavar="DIR", help="folder of the report (%(default)s)")
    add("--disk", type=Path, metavar="DIR", help="folder for random data (--output)")


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its tables; return 0.

    Raises:
        OptionError: an option or the output folder is invalid.
        UserError: the folder is not prepared data.
    """
    shard_counts = [1] if args.data else _numbers("--shards", args.shards, 1)
    lengths, ranks = _numbers("--lengths", args.lengths, 1), _numbers("--ranks", args.ranks, 1)
    first_samples, batch_tokens = (
        _numbers("--samples", args.samples, 0),
        require_positive("--batch-tokens", args.batch_tokens),
    )
    shard_tokens = require_positive("--shard-tokens", args.shard_tokens)
    if not args.seconds > 0:
        raise OptionError("--seconds", f"{args.seconds} is not above 0", "give a positive number")
    import torch

    from kernels.bench.bench_report import describe_machine
    from megatron_ext.bench.checkpoints.report import host
    from megatron_ext.bench.loader import run as loader
    from megatron_ext.bench.loader.report import LoaderReport, LoaderRow, Resume, Turns
    from megatron_ext.bench.loader.turns import measure_turns
    from megatron_ext.data.opening import shard_files

    sizes = [(length, max(1, batch_tokens // length)) for length in lengths]
    rows: list[LoaderRow] = []
    turns: list[Turns] = []
    resumes: list[Resume] = []
    with ExitStack() as folders:
        disk, roots = args.disk or args.output, dict[Path, int]()
        for count in shard_counts:
            root = folders.enter_context(_data(args.data, disk, count, shard_tokens))
            shards = roots[root] = len(shard_files(root)) // 2
            record = folders.enter_context(scratch_folder("loader"))
            loader.verify_once(root, record)
            for length, batch in sizes:
                print_progress(f"{shards} shards, {length} tokens per sample")
                resumes += [loader.resume(root, shards, length, start, 3, record) for start in first_samples]
                # Cold reading comes last, as it evicts the files that the others need in the page cache.
                for number, cold in [*((number, False) for number in ranks), (ranks[-1], True)]:
                    rows.append(loader.measure(root, shards, length, batch, number, args.seconds, cold=cold))
        for length, batch in sizes if len(roots) > 1 else ():
            print_progress(f"in alternation, {length} tokens per sample")
            for number in ranks:
                turns += measure_turns(roots, length, batch, number, args.seconds)
    data = (
        f"`{args.data}`"
        if args.data
        else f"Random data, {shard_tokens:,} tokens per shard, documents of 1,000 on average"
    )
    machine = describe_machine(torch.device("cpu")) | host()
    report = LoaderReport(machine=machine, data=data, seconds=args.seconds, rows=rows, turns=turns, resumes=resumes)
    save_into(args.output, report.write)
    print(report.markdown())
    return 0


def _numbers(option: str, text: str, minimum: int) -> list[int]:
    """Parse comma-separated integers."""
    parts = split_list(text)
    if not parts or not all(part.isdecimal() and int(part) >= minimum for part in parts):
        raise OptionError(option, f"{text!r} is not a list of integers >= {minimum}", "write it like 10,100")
    return [int(part) for part in parts]


@contextmanager
def _data(path: Path | None, disk: Path, shards: int, shard_tokens: int) -> Iterator[Path]:
    """Context manager that yields the data folder; random data is removed at the end."""
    if path is not None:
        yield path
        return
    from megatron_ext.data.random_data import make_random_data

    try:
        disk.mkdir(parents=True, exist_ok=True)
        with scratch_folder("random-data", disk) as folder:
            make_random_data(folder, shards, shard_tokens, seed=0)
            yield folder
    except OSError as error:
        raise OptionError(
            "--disk",
            f"{disk} cannot be written ({os_error_reason(error)})",
            "give another folder, with enough free space",
        ) from None
