"""Conversion holds a few tensors at a time, however large the model is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.conversion.families import FAMILIES
from megatron_ext.checkpoint.conversion.made import to_theirs
from megatron_ext.checkpoint.conversion.our_model import expected_tensors
from megatron_ext.checkpoint.conversion.saved import configured_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MB = 1 << 20
VOCABULARY, LAYERS = 8192, 10
LARGEST = VOCABULARY * 1024 * 4
SLACK = 128 * MB
"""A layer, and what goes through it; eight times less than users are told."""

MEASURED = """
import re, sys
from pathlib import Path
from megatron_ext.cli import main
import transformers.models.llama.modeling_llama
assert main(sys.argv[1:]) == 0
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
# Not getrusage: what it says of a process begins with the one that started it.


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 400 MB, whose largest tensor has 32."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("large")
    model = f"{{pattern: 'attention*{LAYERS}', hidden_size: 1024, num_attention_heads: 8, ffn_hidden_size: 2048}}"
    (folder / "model.yaml").write_text(f"model: {model}\n")
    saved, family = configured_model(folder / "model.yaml", VOCABULARY), FAMILIES["LlamaForCausalLM"]
    infos, tensors = expected_tensors(saved), {}
    for step in to_theirs(family.rules(saved)):
        made = step.make([torch.empty(infos[key].shape).normal_(0.0, 0.02) for key in step.inputs])
        tensors |= {key: tensor.contiguous() for key, tensor in zip(step.outputs, made, strict=True)}
    (folder / "hf").mkdir()
    save_file(tensors, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text(json.dumps(family.config(saved)))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 10 * LARGEST
    return folder / "hf"


def peak(*arguments: object) -> int:
    """Largest resident memory of the command, in bytes."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, "convert", *map(str, arguments)]
    # So that what is freed is given back, and does not count any more.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MB)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]) * 1024


def test_memory_is_that_of_two_tensors(llama: Path, tmp_path: Path) -> None:
    imports = peak(llama, tmp_path / "none", "--to", "megatron", "--dry-run")
    limit = imports + 2 * LARGEST + SLACK
    assert peak(llama, tmp_path / "run", "--to", "megatron", "--no-verify") < limit
    # Both models are run, too, a layer at a time.
    assert peak(tmp_path / "run", tmp_path / "hf", "--to", "hf", "--shard-size", "0.1", "--verify") < limit
    assert peak(tmp_path / "run", tmp_path / "ds", "--to", "deepspeed-universal", "--verify") < limit
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
