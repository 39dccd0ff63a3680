"""Memory of a conversion: one or two tensors at a time, for models of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.conversion.core.converted_tensors import to_theirs
from megatron_ext.conversion.core.our_model import expected_tensors
from megatron_ext.conversion.core.saved_model import configured_model
from megatron_ext.conversion.huggingface.families import FAMILIES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MB = 1 << 20
LARGEST = 16 * MB
"""Bytes of the embedding, the output layer, and each layer's first feed-forward matrix, which is merged from two."""
SLACK = 24 * MB
"""Allowed extra bytes. A layer's float64 activations take 10 MB. A third tensor would exceed this. Docs say 1 GiB."""
LENGTH = 32
"""Tokens of the compared logits, fewer than in the short comparison: comparing takes most of the time.

`asked.py` bounds the activations of the long comparison.
"""

# The first model is small: its peak is that of the imports. Later peaks are compared with it.
MEASURED = """
import re, sys
from pathlib import Path
from megatron_ext.cli import main

def convert(*arguments):
    assert main(["convert", *map(str, arguments)]) == 0
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])  # getrusage's begins with the parent's

for folder in map(Path, sys.argv[1:]):
    hf, run = folder / "hf", folder / "run"
    peaks = {
        "hf to megatron": convert(hf, run, "--to", "megatron"),
        "megatron to hf": convert(run, folder / "back", "--to", "hf", "--shard-size", "0.03"),
        "megatron to hf, rounded": convert(run, folder / "rounded", "--to", "hf", "--dtype", "bf16"),
        "megatron to deepspeed": convert(run, folder / "ds", "--to", "deepspeed-universal"),
        "bf16 to megatron in fp32": convert(folder / "rounded", folder / "fp32", "--to", "megatron", "--dtype", "fp32"),
    }
    print("peaks", *peaks.values())
"""


def llama(folder: Path, vocab_size: int, hidden_size: int) -> tuple[int, int]:
    """Write a model into `hf` of a folder. Return the bytes of its largest tensor and of all tensors."""
    from safetensors.torch import save_file

    sizes = f"hidden_size: {hidden_size}, ffn_hidden_size: {2 * hidden_size}, num_attention_heads: 8"
    (folder / "hf").mkdir(parents=True)
    sizes += f", max_position_embeddings: {LENGTH}"
    (folder / "model.yaml").write_text(f"model: {{pattern: 'attention*2', {sizes}}}\n")
    saved, family = configured_model(folder / "model.yaml", vocab_size), FAMILIES["LlamaForCausalLM"]
    infos, tensors = expected_tensors(saved), {}
    for step in to_theirs(family.rules(saved)):
        outputs = step.convert([torch.empty(infos[key].shape).normal_(0.0, 0.02) for key in step.inputs])
        tensors |= {key: tensor.contiguous() for key, tensor in zip(step.outputs, outputs, strict=True)}
    save_file(tensors, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text(json.dumps(family.config(saved)))
    num_bytes = [info.num_bytes for info in infos.values()]
    return max(num_bytes), sum(num_bytes)


def test_memory_is_below_two_tensors_and_slack(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    llama(small, 512, 64)
    largest, total = llama(large, 4096, 1024)
    assert largest == LARGEST
    assert total > 2 * LARGEST + SLACK
    # Make malloc return freed memory to the system, so that it does not count.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MB)}
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(small), str(large)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported, peaks = ([int(x) for x in line.split()[1:]] for line in done.stdout.splitlines() if line[:5] == "peaks")
    assert len(list((large / "back").glob("model-*-of-*.safetensors"))) > 2
    above = [(peak - imported[-1]) / MB for peak in peaks]
    assert max(above) * MB < 2 * LARGEST + SLACK, above
