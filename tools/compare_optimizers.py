"""Train one configuration under several optimizers, and write a table of losses, step times and memory.

    python tools/compare_optimizers.py examples/110m_2k.yaml data.path=data/mine --processes 2 --output out

Each run is a separate `selectron train`, one after the other. With `--rounds 2` all run again, so that a drift of the
machine's speed affects all of them. The program writes optimizers.json and optimizers.md into the output folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from training_runs import comparison_parser, largest_difference, train

from megatron_ext.utils import markdown

OPTIMIZERS = {
    "none": ["optimizer.sharding=none"],
    "megatron": ["optimizer.sharding=megatron"],
    "zero1": ["optimizer.sharding=zero1"],
    "zero2": ["optimizer.sharding=zero2"],
    "zero3": ["optimizer.sharding=zero3"],
    "zero1-offload": ["optimizer.sharding=zero1", "optimizer.offload=cpu"],
    "zero2-offload": ["optimizer.sharding=zero2", "optimizer.offload=cpu"],
    "zero3-offload": ["optimizer.sharding=zero3", "optimizer.offload=cpu", "optimizer.offload_parameters=cpu"],
    # Same sums in another order: shows how far apart two bf16 runs drift by rounding alone.
    "megatron-tp2": ["optimizer.sharding=megatron", "parallel.tensor=2", "parallel.sequence=true"],
}
REFERENCE = "megatron"


@dataclass(frozen=True)
class Outcome:
    """Measurements of one run.

    Attributes:
        optimizer: a key of OPTIMIZERS.
        losses: loss of every step, nats per token; empty if the run failed (see its log).
        milliseconds: duration of every step.
        peak_memory: bytes, maximum over ranks.
    """

    optimizer: str
    losses: list[float]
    milliseconds: list[float]
    peak_memory: int

    def step_time(self, skipped: int) -> float:
        """Return the median milliseconds of a step after the first `skipped` ones, in which kernels are compiled."""
        return statistics.median(self.milliseconds[skipped:])


def run(optimizer: str, number: int, args: argparse.Namespace) -> Outcome:
    """Train with one optimizer."""
    settings = [*args.overrides, "parallel.tensor=1", "parallel.sequence=false", *OPTIMIZERS[optimizer]]
    settings += [f"training.steps={args.steps}", "training.evaluate_every=0", "training.checkpoint_every=0"]
    steps = train(args.config, settings, args.output, f"{optimizer}-{number}", processes=args.processes)
    if not steps:
        return Outcome(optimizer, [], [], 0)
    tokens = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *steps], steps, strict=False)]
    return Outcome(
        optimizer,
        [step["loss"] for step in steps],
        [1000 * count / step["tokens_per_second"] for count, step in zip(tokens, steps, strict=True)],
        max(step["peak_memory"] for step in steps),
    )


def table(outcomes: Sequence[Outcome], skipped: int) -> str:
    """Return a Markdown table of the fastest round of each optimizer, with its step time relative to the reference."""
    best: dict[str, Outcome] = {}
    for outcome in outcomes:
        previous = best.get(outcome.optimizer)
        if outcome.losses and (previous is None or outcome.step_time(skipped) < previous.step_time(skipped)):
            best[outcome.optimizer] = outcome
    reference = best.get(REFERENCE)
    columns = ["optimizer", "ms per step", f"ratio to {REFERENCE}", "all rounds, ms", "peak memory, GiB", "first loss"]
    columns += ["last loss", f"largest difference from {REFERENCE}"]
    rows = []
    for name in dict.fromkeys(outcome.optimizer for outcome in outcomes):
        if name not in best:
            rows.append([name, "failed", *[""] * (len(columns) - 2)])
            continue
        fastest = best[name]
        rounds = [o.step_time(skipped) for o in outcomes if o.optimizer == name and o.losses]
        fields = [name, f"{fastest.step_time(skipped):.1f}", "", " ".join(f"{ms:.1f}" for ms in rounds)]
        fields += [f"{fastest.peak_memory / 2**30:.1f}", f"{fastest.losses[0]:.4f}", f"{fastest.losses[-1]:.4f}", ""]
        if reference is not None:
            fields[2] = f"{fastest.step_time(skipped) / reference.step_time(skipped):.3f}"
            fields[-1] = largest_difference(fastest.losses, reference.losses)
        rows.append(fields)
    return "\n".join(markdown.table(columns, rows)) + "\n"


def main() -> int:
    """Run all optimizers. Return 1 if a run failed, else 0."""
    parser = comparison_parser(__doc__)
    parser.add_argument("--optimizers", default="megatron,zero1,zero2,zero3,none,megatron-tp2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_intermixed_args()
    names = args.optimizers.split(",")
    unknown = sorted(set(names) - OPTIMIZERS.keys())
    if unknown:
        parser.error(f"--optimizers: unknown {', '.join(unknown)}; choose from {', '.join(OPTIMIZERS)}")
    args.output.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for number in range(args.rounds):
        for name in names:
            outcomes.append(run(name, number, args))
            results = {"torch": torch.__version__, "runs": [asdict(outcome) for outcome in outcomes]}
            markdown.write_report(args.output, "optimizers", results, table(outcomes, args.steps // 5))
    print(table(outcomes, args.steps // 5))
    return 0 if all(outcome.losses for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
