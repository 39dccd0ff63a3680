"""Options of `selectron bench kernels`."""

import argparse
import re

from kernels.bench.arguments import (
    add_run_arguments,
    parse_names,
    print_progress,
    require_positive,
    resolve_seed,
    save_into,
    split_list,
)
from kernels.bench.cases import ALIASES, CHOICE_DISTRIBUTIONS, OPS, PASSES, PEERS, KernelPlan, OptionError, Shape

DEFAULT_OPS = "top1_chunk:approx,top1_chunk:exact,top1_element"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--lengths", default="2048x50,8192x12,102400x1", metavar="LIST", help="LENGTHxBATCH, ... (%(default)s)")
    add("--heads", default="16x128,32x64", metavar="LIST", help="HEADSxDIM, ... (%(default)s)")
    add("--groups", type=int, metavar="N", help="key/value heads (as many as query heads)")
    add("--ops", default=DEFAULT_OPS, metavar="LIST", help=f"our ops, from {', '.join(OPS)} (%(default)s)")
    add("--peers", default=",".join(PEERS), metavar="LIST", help='other implementations; "" for none (%(default)s)')
    add(
        "--choices",
        choices=CHOICE_DISTRIBUTIONS,
        default="even",
        help="distribution of the queries over chunks (%(default)s)",
    )
    add("--passes", default=",".join(PASSES), metavar="LIST", help="passes to time (%(default)s)")
    add("--chunk-size", type=int, default=128, metavar="N", help="keys per chunk (%(default)s)")
    add("--top-k", type=int, default=1, metavar="N", help="chunks per query (%(default)s)")
    add_run_arguments(parser, output="bench/kernels")


def make_plan(args: argparse.Namespace) -> KernelPlan:
    """Check the options and return the plan.

    Raises:
        OptionError: an option has an invalid value.
    """
    ops = parse_names("--ops", args.ops, OPS, ALIASES)
    peers = parse_names("--peers", args.peers, PEERS)
    if not ops and not peers:
        raise OptionError("--ops", "is empty, and so is --peers", "name at least one op or peer")
    passes = parse_names("--passes", args.passes, PASSES)
    if not passes:
        raise OptionError("--passes", "is empty", f"give one of {', '.join(PASSES)}, or both")
    shapes = make_shapes(args.lengths, args.heads, args.groups)
    if ops:
        _check_limits(args, max(shape.head_dim for shape in shapes))
    return KernelPlan(
        shapes=shapes,
        ops=ops,
        peers=peers,
        passes=tuple(name for name in PASSES if name in passes),
        choices=args.choices,
        repeat=require_positive("--repeat", args.repeat),
        chunk_size=require_positive("--chunk-size", args.chunk_size),
        top_k=require_positive("--top-k", args.top_k),
        seed=resolve_seed(args),
        output=args.output,
    )


def make_shapes(lengths: str, heads: str, groups: int | None) -> tuple[Shape, ...]:
    """Combine every number of heads with every length.

    Raises:
        OptionError: a pair is malformed, or the key heads do not divide the query heads.
    """
    shapes = []
    for num_heads, head_dim in _pairs("--heads", heads, "HEADSxDIM, as 16x128"):
        num_groups = num_heads if groups is None else require_positive("--groups", groups)
        if num_heads % num_groups:
            raise OptionError("--groups", f"{num_groups} does not divide {num_heads} heads", "give a divisor")
        for length, batch in _pairs("--lengths", lengths, "LENGTHxBATCH, as 2048x50"):
            shapes.append(Shape(batch=batch, length=length, heads=num_heads, groups=num_groups, head_dim=head_dim))
    return tuple(shapes)


def _check_limits(args: argparse.Namespace, head_dim: int) -> None:
    """Raise OptionError for settings that our kernels do not support."""
    from kernels.common.dispatch import MAX_TRITON_HEAD_DIM
    from kernels.top1_chunk.interface import MAX_TOP_K, TRITON_CHUNK_SIZES

    if head_dim > MAX_TRITON_HEAD_DIM:
        raise OptionError("--heads", f"head dim {head_dim} is too large", f"give at most {MAX_TRITON_HEAD_DIM}")
    if args.chunk_size not in TRITON_CHUNK_SIZES:
        sizes = ", ".join(map(str, TRITON_CHUNK_SIZES))
        raise OptionError("--chunk-size", f"{args.chunk_size} is not supported", f"give one of {sizes}")
    if args.top_k > MAX_TOP_K:
        raise OptionError("--top-k", f"{args.top_k} is too large", f"give at most {MAX_TOP_K}")


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its table.

    Returns:
        0, or 1 if a result was wrong.

    Raises:
        OptionError: an option, the output folder or the machine does not allow it.
    """
    plan = make_plan(args)
    from kernels.bench import timing
    from kernels.bench.report import KernelReport
    from kernels.bench.run import bench

    device = timing.find_device(args.device)

    def save(partial_report: KernelReport) -> None:
        save_into(plan.output, partial_report.write)

    meter = timing.CudaMeter(device, plan.repeat)
    report = bench(plan, meter, device, progress=print_progress, save=save)
    print(report.markdown())
    print(f"written: {plan.output}")
    return 1 if report.failures else 0


def _pairs(option: str, text: str, expected_format: str) -> list[tuple[int, int]]:
    pairs = []
    for part in split_list(text):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part)
        if match is None:
            raise OptionError(option, f"{part!r} is not a pair of positive integers", f"write {expected_format}")
        pairs.append((int(match[1]), int(match[2])))
    if not pairs:
        raise OptionError(option, "is empty", f"write {expected_format}")
    return pairs
