"""Options of `selectron bench layers`, and their conversion to a plan."""

from __future__ import annotations

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
from kernels.bench.cases import OptionError
from megatron_ext.bench.layers.cases import PEERS, SIZES, LayerPlan, LayerShape

# Enough tokens that no layer is limited by launches from Python.
DEFAULT_SHAPES = "110m:2048x50,1p3b:2048x16,1p3b:8192x4,1p3b:32768x1,1p3b:102400x1"
SHAPE_HINT = f"write SIZE[/HEADS]:LENGTHxBATCH, e.g. 110m:2048x16 or 110m/2:2048x16; sizes are {', '.join(SIZES)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--mixers", metavar="LIST", help="names as in model.pattern (all)")
    add("--shapes", default=DEFAULT_SHAPES, metavar="LIST", help="SIZE[/HEADS]:LENGTHxBATCH, ... (%(default)s)")
    add("--peers", default=",".join(PEERS), metavar="LIST", help='peers to compare with; "" for none (%(default)s)')
    add(
        "--configurations",
        type=int,
        metavar="N",
        help="maximum number of configurations that a kernel autotunes over (all)",
    )
    add_run_arguments(parser, output="bench/layers")


def make_plan(args: argparse.Namespace) -> LayerPlan:
    """Check the options and return the settings.

    Raises:
        OptionError: an option has an invalid value.
    """
    return LayerPlan(
        shapes=make_shapes(args.shapes),
        peers=parse_names("--peers", args.peers, PEERS),
        repeat=require_positive("--repeat", args.repeat),
        seed=resolve_seed(args),
        configurations=None
        if args.configurations is None
        else require_positive("--configurations", args.configurations),
        output=args.output,
        mixers=_mixers(args.mixers),  # last, as it imports torch
    )


def _mixers(text: str | None) -> tuple[str, ...]:
    from megatron_ext.mixers.core.registry import load_all

    registered = sorted(load_all())
    found = parse_names("--mixers", ",".join(registered) if text is None else text, registered)
    if not found:
        raise OptionError("--mixers", "is empty", f"name some of {', '.join(registered)}, or omit the option for all")
    return found


def make_shapes(text: str) -> tuple[LayerShape, ...]:
    """Parse a list of shapes, without duplicates.

    Raises:
        OptionError: a shape is malformed or its size unknown.
    """
    shapes = [_shape(part) for part in split_list(text)]
    if not shapes:
        raise OptionError("--shapes", "is empty", SHAPE_HINT)
    return tuple(dict.fromkeys(shapes))


def _shape(text: str) -> LayerShape:
    match = re.fullmatch(r"((\w+)(?:/([1-9]\d*))?):([1-9]\d*)x([1-9]\d*)", text)
    if match is None or match[2] not in SIZES:
        raise OptionError("--shapes", f"{text!r} is not a valid shape", SHAPE_HINT)
    size = SIZES[match[2]]
    size = size._replace(heads=int(match[3] or size.heads))
    return LayerShape(size_name=match[1], size=size, length=int(match[4]), batch=int(match[5]))


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and print its table.

    Returns:
        0, or 1 if a mixer of ours was wrong or did not run.

    Raises:
        OptionError: an option, the output folder or the machine is unsuitable.
    """
    plan = make_plan(args)
    from kernels.bench import timing
    from megatron_ext.bench.layers.report import LayerReport
    from megatron_ext.bench.layers.run import bench
    from megatron_ext.bench.layers.tuning import limit_tuning
    from megatron_ext.platform.device import select_platform

    device = timing.find_device(args.device)
    if plan.configurations is not None:
        limit_tuning(plan.configurations)
    platform = select_platform("cuda" if device.type == "cuda" else "cpu", device.index or 0)

    def save(partial_report: LayerReport) -> None:
        save_into(plan.output, partial_report.write)

    report = bench(plan, timing.CudaMeter(device, plan.repeat), platform, report_progress=print_progress, save=save)
    print(report.markdown())
    print(f"written: {plan.output}")
    return 1 if report.failures else 0
