"""Compatibility with Hugging Face's transformers: a Llama runs in a process that has our packages installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import cases

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import data_prep, kernels, megatron_ext
import kernels.top1_chunk
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32,
)
model = AutoModelForCausalLM.from_config(config).eval()
tokens = torch.arange(12).reshape(2, 6)
with torch.no_grad():
    output = model(tokens, labels=tokens)
assert output.logits.shape == (2, 6, 64), output.logits.shape
assert output.logits.isfinite().all() and output.loss > 0
# The last token is seen by itself alone: attention is causal whatever `kernels` is.
with torch.no_grad():
    changed = model(torch.cat([tokens[:, :-1], tokens[:, -1:] + 1], 1)).logits
assert torch.equal(changed[:, :-1], output.logits[:, :-1]) and not torch.equal(changed[:, -1], output.logits[:, -1])

config.save_pretrained("saved")
assert AutoConfig.from_pretrained("saved").hidden_size == 16
print(kernels.__file__)
"""


FIRST = cases(every=["ours", "transformers"], default=["ours"])
"""Package that is imported first. Both look for `kernels` on the same path, whichever comes first."""


@pytest.mark.parametrize("first", FIRST)
def test_a_llama_runs_beside_our_packages(tmp_path, first):
    pytest.importorskip("transformers", minversion="5")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ("import transformers\n" if first == "transformers" else "") + PROGRAM],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "kernels" / "__init__.py")
