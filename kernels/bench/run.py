"""Run of the benchmark: check, then time every contestant at every shape."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kernels.bench import costs, ours, peers
from kernels.bench.bench_report import describe_machine
from kernels.bench.cases import OPS, PEERS, KernelPlan, Pass, Shape
from kernels.bench.checks import Verdict, check
from kernels.bench.contestant import Builder, Contestant, NotRun, one_line
from kernels.bench.inputs import make_inputs
from kernels.bench.report import KernelReport, KernelRow, Measured
from kernels.bench.timing import Meter

Inputs = tuple[Tensor, Tensor, Tensor]


def make_builders(plan: KernelPlan, device: torch.device) -> dict[str, Builder]:
    """Return the builders of all contestants of a plan by name, peers first."""
    # The implementation is explicit, so that nothing falls back to the reference silently.
    implementation: Literal["triton", "reference"] = "triton" if device.type == "cuda" else "reference"
    known: dict[str, Builder] = {
        "sdpa_cudnn": partial(peers.sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "sdpa_flash": partial(peers.sdpa, backend=SDPBackend.FLASH_ATTENTION),
        # The own chunk and as many chunks as a query selects: about the work of Top-1 Chunk attention.
        "flex_window": partial(peers.flex_window, window=plan.chunk_size * (1 + plan.top_k)),
        "nsa": peers.nsa,
    }
    chunk = partial(ours.top1_chunk, chunk_size=plan.chunk_size, top_k=plan.top_k, implementation=implementation)
    element = partial(ours.top1_element, chunk_size=plan.chunk_size, implementation=implementation)
    for name in OPS:
        op, _, variant = name.partition(":")
        known[name] = partial(chunk, score=variant) if op == "top1_chunk" else partial(element, estimator=variant)
    return {name: known[name] for name in (*plan.peers, *plan.ops)}


def bench(
    plan: KernelPlan,
    meter: Meter,
    device: torch.device,
    *,
    progress: Callable[[str], None] = print,
    save: Callable[[KernelReport], None] | None = None,
    builders: Mapping[str, Builder] | None = None,
) -> KernelReport:
    """Check and measure all contestants at all shapes.

    Args:
        plan: settings of the run.
        meter: measures times and memory on `device`.
        device: device of the tensors.
        progress: receives a line after each case.
        save: receives the partial report after each contestant, so that an interrupted run keeps its results.
        builders: contestants by name; None for those of the plan.
    """
    torch.manual_seed(plan.seed)  # for output gradients and sampled rows; inputs have their own generators
    seeds = itertools.count(plan.seed)
    contestants = make_builders(plan, device) if builders is None else builders
    report = KernelReport(plan=plan, machine=describe_machine(device), ceilings=meter.ceilings(), rows=[])
    if save is not None:
        save(report)  # fails early if the folder is not writable

    def draw(shape: Shape) -> Inputs:
        return make_inputs(shape, plan.choices, plan.chunk_size, next(seeds), device)

    for shape, (name, build) in itertools.product(plan.shapes, contestants.items()):
        for row in measure(name, build, shape, plan.passes, meter, draw):
            report.rows.append(row)
            progress(f"{shape.heads_name} {shape.length_name} {name} {row.pass_name}: {row.summary}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if save is not None:
            save(report)
    return report


def measure(
    name: str, build: Builder, shape: Shape, passes: tuple[Pass, ...], meter: Meter, draw: Callable[[Shape], Inputs]
) -> list[KernelRow]:
    """Check one contestant at one shape, and time the passes with correct results."""
    rows = [KernelRow(name=name, shape=shape, pass_name=pass_name) for pass_name in passes]
    try:
        verdict = check(build, shape, draw, gradients="forward_backward" in passes)
        contestant = build(shape)
    except Exception as error:  # any kernel failure is reported in its row, and the others still run
        return [_error_row(row, error) for row in rows]
    return [_timed(replace(row, verdict=verdict), contestant, verdict, meter, draw) for row in rows]


def _timed(
    row: KernelRow, contestant: Contestant, verdict: Verdict, meter: Meter, draw: Callable[[Shape], Inputs]
) -> KernelRow:
    """Complete a row with its failure or its measurements."""
    failure = verdict.failure or (verdict.gradient_failure if row.pass_name == "forward_backward" else None)
    if failure is not None:
        return replace(row, failed=failure)
    try:
        run = make_pass(contestant, row.pass_name, draw(row.shape))
        times, new_bytes = meter.time(run), meter.new_bytes(run)
    except Exception as error:
        return _error_row(row, error)
    extra = (new_bytes - costs.result_bytes(row.shape, row.pass_name)) / costs.baseline_bytes(row.shape, row.pass_name)
    measured = Measured(
        times=times,
        operations=contestant.operations.for_pass(row.pass_name),
        bytes=costs.traffic_bytes(row.shape, row.pass_name),
        extra_memory=extra,
    )
    return replace(row, measured=measured)


def make_pass(contestant: Contestant, pass_name: Pass, inputs: Inputs) -> Callable[[], object]:
    """Return a function that runs the forward pass without gradients, or the forward and backward pass."""
    q, k, v = (x.requires_grad_() for x in inputs)
    if pass_name == "forward":

        def forward() -> object:
            with torch.no_grad():
                return contestant.run(q, k, v)

        return forward
    with torch.no_grad():
        grad = torch.randn_like(contestant.run(q, k, v))  # in the output's layout, so that no peer has to copy it

    def forward_backward() -> object:
        out = contestant.run(q, k, v)
        return out, torch.autograd.grad(out, (q, k, v), grad)

    return forward_backward


def _error_row(row: KernelRow, error: Exception) -> KernelRow:
    """Classify an exception: a peer may fail to run, but one of our ops may not."""
    if isinstance(error, NotRun):
        return replace(row, not_run=str(error))
    message = one_line(error)
    return replace(row, not_run=message) if row.name in PEERS else replace(row, failed=message)
