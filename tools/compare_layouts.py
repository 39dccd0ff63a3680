"""Train one configuration under several layouts, devices and back-ends, and write a table of the losses.

    python tools/compare_layouts.py examples/quickstart.yaml --output out --steps 20 --devices cpu,cuda --jobs 6

Each run is a separate `selectron train`. The program writes losses.json and losses.md into the output folder. Runs of
other machines are added from their losses.json. With `--devices ""` no run is started:

    python tools/compare_layouts.py examples/quickstart.yaml --output out --devices "" --others cpu.json,gpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from training_runs import comparison_parser, largest_difference, train

from megatron_ext.utils import markdown

COLUMNS = (
    *("pattern", "precision", "device", "back-end", "layout"),
    *("first loss", "last loss", "from the CPU", "from one GPU"),
)
LAYOUTS = {
    "1": [],
    "TP2+SP": ["parallel.tensor=2", "parallel.sequence=true"],
    "TP2": ["parallel.tensor=2", "parallel.sequence=false"],
    "PP2": ["parallel.pipeline=2"],
    "PP2x2": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    "CP2": ["parallel.context=2"],
    "DP2": [],
}
ONE_PROCESS = ["parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1", "parallel.context=1"]


@dataclass(frozen=True)
class Case:
    """One run of the comparison.

    Attributes:
        pattern: `model.pattern`.
        precision: fp32 or bf16.
        device: cpu or cuda.
        backend: local or transformer_engine.
        layout: a key of LAYOUTS.
    """

    pattern: str
    precision: str
    device: str
    backend: str
    layout: str

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return 1 if self.layout == "1" else 2

    @property
    def name(self) -> str:
        """Name of the run."""
        parts = (self.pattern.split("*")[0], self.precision, self.device, self.backend, self.layout)
        return "-".join(parts).replace("+", "")

    def overrides(self) -> list[str]:
        """Dotted overrides of the configuration."""
        return [
            *ONE_PROCESS,
            *LAYOUTS[self.layout],
            f"model.pattern={self.pattern}",
            f"training.precision={self.precision}",
            f"run.device={self.device}",
            f"run.backend={self.backend}",
        ]


def cases(patterns: Sequence[str], devices: Sequence[str], backends: Sequence[str]) -> list[Case]:
    """Return one CPU case in fp32 and in bf16; on CUDA every layout in fp32, and in bf16 with each back-end."""
    result = []
    for pattern in patterns:
        if "cpu" in devices:
            result += [Case(pattern, precision, "cpu", "local", "1") for precision in ("fp32", "bf16")]
        if "cuda" in devices:
            layouts = [name for name in LAYOUTS if name == "1" or torch.cuda.device_count() > 1]
            result += [Case(pattern, "fp32", "cuda", "local", name) for name in layouts]
            result += [Case(pattern, "bf16", "cuda", backend, name) for backend in backends for name in layouts]
    return result


def run_case(case: Case, number: int, config: Path, output: Path, overrides: Sequence[str]) -> list[float]:
    """Train one case and return the loss of every step; an empty list if it failed (see its log)."""
    environment = {"OMP_NUM_THREADS": "4"}
    if case.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif case.processes == 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(number % torch.cuda.device_count())
    settings = [*case.overrides(), *overrides]
    steps = train(config, settings, output, case.name, processes=case.processes, environment=environment)
    return [step["loss"] for step in steps]


def read_results(path: Path) -> dict[Case, list[float]]:
    """Read the losses of each case from a losses.json."""
    rows = json.loads(path.read_text())["cases"]
    return {Case(**{key: row[key] for key in row if key != "losses"}): row["losses"] for row in rows}


def table(results: dict[Case, list[float]]) -> str:
    """Return a Markdown table of first and last loss, and of the largest differences from one CPU and one GPU."""
    # Compared rows are adjacent, even if they were run on different machines.
    patterns = list(dict.fromkeys(case.pattern for case in results))
    rows = []
    for case in sorted(results, key=lambda case: (patterns.index(case.pattern), case.device)):
        losses = results[case]
        cpu = None if case.device == "cpu" else results.get(replace(case, device="cpu", backend="local", layout="1"))
        gpu = None if case.device == "cpu" or case.layout == "1" else results.get(replace(case, layout="1"))
        fields = [case.pattern, case.precision, case.device, case.backend, case.layout]
        fields += [f"{losses[0]:.6f}", f"{losses[-1]:.6f}"] if losses else ["failed", ""]
        rows.append([*fields, largest_difference(losses, cpu), largest_difference(losses, gpu)])
    return "\n".join(markdown.table(COLUMNS, rows)) + "\n"


def main() -> int:
    """Run all cases. Return 1 if one failed, else 0."""
    parser = comparison_parser(__doc__)
    parser.add_argument("--patterns", default="attention*4,top1_chunk*4,gated_deltanet*4")
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--backends", default="local")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--others", default="", help="losses.json of other machines, comma-separated")
    args = parser.parse_intermixed_args()
    args.output.mkdir(parents=True, exist_ok=True)
    selected = cases(args.patterns.split(","), args.devices.split(","), args.backends.split(","))
    overrides = [
        f"training.steps={args.steps}",
        "optimizer.warmup_steps=2",
        "training.evaluate_every=0",
        *args.overrides,
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        losses = pool.map(
            lambda item: run_case(item[1], item[0], args.config, args.output, overrides), enumerate(selected)
        )
    results: dict[Case, list[float]] = {}
    for path in filter(None, args.others.split(",")):
        results |= read_results(Path(path))
    results |= dict(zip(selected, losses, strict=True))
    rows = [{**asdict(case), "losses": values} for case, values in results.items()]
    markdown.write_report(args.output, "losses", {"torch": torch.__version__, "cases": rows}, table(results))
    print(table(results))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
