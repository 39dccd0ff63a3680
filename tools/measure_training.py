"""Measure rows of the table in docs/benchmarks/training.md on this machine's GPUs: models of 1.3B parameters by length.

    python tools/measure_training.py --processes 2 --seq-length 2048 8192 --models megatron exact --output bench/two

runs one `selectron bench train` with examples/1p3b_100k.yaml, with a variant for each row of the table. Below 102,400
tokens each GPU is a replica with 65,536 tokens per step, in two micro-batches, without recomputation. At 102,400 tokens
there is one sample per GPU. One GPU recomputes as `Model.recompute` says. Several GPUs use context parallelism with
copy engines, without recomputation. Plain megatron-core, which has no such exchange, recomputes whole layers in
replicas. To add a report to the table, list its name in tools/training_table.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "examples/1p3b_100k.yaml"
LONG = 102400
ONE_GPU = [
    *("parallel.tensor=1", "parallel.sequence=false", "parallel.context=1", "training.recompute=none"),
    *("parallel.context_transport=nccl", "parallel.context_exchange_rounds=1"),
]
"""Overrides of all rows, before a row's own. They keep the table independent of the layout in the example."""


@dataclass(frozen=True)
class Model:
    """Model of a table row.

    Attributes:
        overrides: overrides of the configuration, or a configuration file.
        recompute: value of `training.recompute` on one GPU at 102,400 tokens.
        passes_states: True if context-parallel ranks pass recurrent states, in which case rounds bring no gain.
        plain: True if the model is plain megatron-core.
    """

    overrides: str
    recompute: str = "mlp"
    passes_states: bool = False
    plain: bool = False


MODELS = {
    "megatron": Model("model.pattern=attention*24", recompute="full", plain=True),
    "attention": Model("model.pattern=attention*24"),
    "approx": Model("mixers.top1_chunk.score=approx"),
    "exact": Model("mixers.top1_chunk.score=exact"),
    "gdn": Model("examples/mixers/1p3b/gated_deltanet.yaml", recompute="full", passes_states=True),
    "rwkv7_block": Model("examples/models/1p3b/rwkv7_block_top1_chunk.yaml"),
    "hybrid": Model("examples/models/1p3b/gated_deltanet_top1_chunk.yaml", recompute="full", passes_states=True),
}


def row(name: str, length: int, processes: int) -> list[str]:
    """Return the options of `selectron bench train` for one row of the table.

    Args:
        name: a key of MODELS.
        length: tokens per sample; 102,400, or a divisor of 32,768.
        processes: number of GPUs.
    """
    model = MODELS[name]
    overrides = [model.overrides, f"data.seq_length={length}"]
    if length < LONG:
        overrides.append(f"training.global_batch_size={processes * 65536 // length}")
        overrides.append(f"training.micro_batch_size={32768 // length}")
    else:
        overrides.append(f"training.global_batch_size={processes}")
        if processes == 1 or model.plain:
            overrides.append(f"training.recompute={model.recompute}")
        else:
            overrides += [f"parallel.context={processes}", "parallel.context_transport=copy_engine"]
            rounds = 1 if model.passes_states else 2
            overrides.append(f"parallel.context_exchange_rounds={rounds}")
            if not model.passes_states:
                overrides.append(f"training.micro_batch_size={processes // 2}")
    option, thousands = "--plain" if model.plain else "--variant", "100k" if length == LONG else f"{length // 1024}k"
    return [option, f"{thousands}_{name}:{','.join(overrides)}"]


def command(models: Sequence[str], lengths: Sequence[int], processes: int, steps: int, output: Path) -> list[str]:
    """Return the command line of `selectron bench train` with a row for each model and length."""
    options = ["--processes", str(processes), "--steps", str(steps), "--warmup", "2", "--profile", "1"]
    rows = [argument for length in lengths for name in models for argument in row(name, length, processes)]
    arguments = ["bench", "train", CONFIG, *ONE_GPU, *options, *rows, "--output", str(output.absolute())]
    return [sys.executable, "-m", "megatron_ext.cli", *arguments]


def main() -> int:
    """Run the benchmark that the arguments describe.

    Returns:
        The exit code of `selectron bench train`.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add("--processes", type=int, choices=(1, 2, 4), default=1, help="number of GPUs (%(default)s)")
    add(
        "--seq-length",
        type=int,
        nargs="+",
        choices=(2048, 8192, 32768, LONG),
        default=[LONG],
        help="tokens per sample (%(default)s)",
    )
    add(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help=f"models: {', '.join(MODELS)}",
    )
    add("--steps", type=int, default=3, help="timed steps, after two untimed ones (%(default)s)")
    add("--output", type=Path, required=True, help="folder of the report")
    args = parser.parse_args()
    arguments = command(args.models, args.seq_length, args.processes, args.steps, args.output)
    return subprocess.run(arguments, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
