"""Losses of fifty steps in bf16, on one GPU and under layouts of several.

    PYTHONPATH=.:tests:tools python tests/distributed/gpu_curves.py --output docs/benchmarks/layouts_bf16.json

keeps what `test_gpu_layouts.py` compares with. Where text cannot be prepared, `--data` names a folder that `corpus`
here has made elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from training_runs import train as train_apart

from megatron_ext.utils.git_info import commit

STEPS, KILLED_AFTER = 50, 30
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp2": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "tp2_no_sp": (2, ["parallel.tensor=2", "parallel.sequence=false"]),
    "cp2": (2, ["parallel.context=2"]),
    "cp2_rounds": (2, ["parallel.context=2", "parallel.context_exchange_rounds=2"]),
    "cp2_copies": (2, ["parallel.context=2", "parallel.context_transport=copy_engine"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp2_interleaved": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "dp2": (2, []),
    "tp4": (4, ["parallel.tensor=4", "parallel.sequence=true"]),
    "cp4": (4, ["parallel.context=4"]),
    "cp4_copies": (
        4,
        ["parallel.context=4", "parallel.context_transport=copy_engine", "parallel.context_exchange_rounds=2"],
    ),
    "tp2_cp2": (4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.context=2"]),
    "tp2_pp2": (4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]),
    "dp4": (4, []),
}
"""Number of GPUs and overrides of each layout."""
CONFIG = """
data: {{path: {data}, seq_length: 1024}}
model: {{pattern: "(top1_chunk,attention)*4", hidden_size: 512, num_attention_heads: 8}}
mixers: {{top1_chunk: {{chunk_size: 64}}}}
training: {{steps: {steps}, global_batch_size: 16, micro_batch_size: 2, checkpoint_every: 10, keep_checkpoints: 0}}
optimizer: {{lr: 5e-4, min_lr: 5e-5, warmup_steps: 10}}
run: {{device: cuda}}
"""


def corpus(folder: Path) -> Path:
    """Prepare the training text of these runs. The result is the same on every machine."""
    from corpora import prepared  # its dependencies are needed only where text is prepared

    return prepared(folder, documents=1500, words=(50, 400))


def configuration(folder: Path, data: Path) -> Path:
    """Write the configuration into a folder and return its path."""
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(data=data, steps=STEPS))
    return path


def train(config: Path, layout: str, first: int = 0) -> list[float]:
    """Train under a layout, in a folder `runs` beside the configuration, and return the loss of every step.

    Args:
        config: path returned by `configuration`.
        layout: key of `LAYOUTS`.
        first: first GPU. The run uses consecutive GPUs from it, modulo the number of GPUs.
    """
    processes, told = LAYOUTS[layout]
    count = torch.cuda.device_count()
    gpus = ",".join(str((first + rank) % count) for rank in range(processes))
    steps = train_apart(
        config, told, config.parent, layout, processes=processes, environment={"CUDA_VISIBLE_DEVICES": gpus}
    )
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), (config.parent / f"{layout}.log").read_text()
    return [step["loss"] for step in steps]


def fingerprint(data: Path) -> str:
    """Hash of the tokens, independent of their folder. Only curves of the same tokens may be compared."""
    manifest = json.loads((data / "manifest.json").read_text())
    return hashlib.sha256(json.dumps([manifest["tokenizer"], manifest["domains"]]).encode()).hexdigest()


def kept_layouts(path: Path, data: str) -> dict[str, Any]:
    """Read the curves in a file by layout. The result is empty if the file does not exist or holds other tokens."""
    kept = json.loads(path.read_text()) if path.exists() else {"data": data, "layouts": {}}
    return kept["layouts"] if kept["data"] == data else {}


def main(argv: Sequence[str] | None = None) -> None:
    """Train under the layouts that fit the GPUs of this machine, and write each curve as soon as its run is done.

    Runs share GPUs, because they are small and spend most of their time starting. More than a few concurrent runs
    would delay each other's messages.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="curves of the same tokens in it stay")
    parser.add_argument("--data", type=Path)
    if not torch.cuda.device_count():
        parser.error("there is no GPU to train on")
    fits = [name for name, (gpus, _) in LAYOUTS.items() if gpus <= torch.cuda.device_count()]
    parser.add_argument("--layouts", nargs="+", choices=fits, default=fits, help="all that there are GPUs for")
    parser.add_argument("--at-once", type=int, default=3, help="runs (3)")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = args.data or corpus(folder)
        config, tokens = configuration(folder, data.resolve()), fingerprint(data)
        layouts = kept_layouts(args.output, tokens)
        where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
        firsts = accumulate((LAYOUTS[name][0] for name in args.layouts), initial=0)
        with ThreadPoolExecutor(args.at_once) as pool:
            runs = {pool.submit(train, config, *what): what[0] for what in zip(args.layouts, firsts, strict=False)}
            for run in as_completed(runs):
                layouts[runs[run]] = {**where, "losses": run.result()}
                args.output.write_text(json.dumps({"data": tokens, "layouts": layouts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
