"""Converted folders in a process with torch and transformers, which must not import Selectron or Megatron."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from hf_cases import HYBRID, HYBRID_MIXERS
from hf_converted import Converted
from torch import Tensor

PROGRAM = '''
import sys

class HidingFinder:
    """Finder that does not find some packages."""
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

hidden = {"megatron", "megatron_ext", "kernels", "data_prep", "triton", "fla", "deepspeed", "pydantic"}
sys.meta_path[:] = [HidingFinder(finder) for finder in sys.meta_path]
import torch
from transformers import AutoModelForCausalLM

folder, tokens, answer = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
with torch.inference_mode():
    logits = model(torch.load(tokens)).logits
generated = model.generate(torch.load(tokens)[:, :9], max_new_tokens=5, do_sample=False, eos_token_id=None)
model(torch.load(tokens), labels=torch.load(tokens)).loss.backward()  # fails for inference tensors
torch.save({"logits": logits, "generated": generated}, answer)
assert not hidden & {name.split(".")[0] for name in sys.modules}
'''


def test_torch_and_transformers_are_enough(convert: Callable[..., Converted], tmp_path: Path, tokens: Tensor) -> None:
    model = convert(f"{HYBRID},attention", HYBRID_MIXERS | {"attention": {"random_keys": True}})
    torch.save(tokens, tmp_path / "tokens.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model.folder), str(tmp_path / "tokens.pt"), str(tmp_path / "answer.pt")],
        env=environment | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = torch.load(tmp_path / "answer.pt")
    expected = model.our_logits(tokens)
    torch.testing.assert_close(answer["logits"], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    generated = model.theirs.generate(tokens[:, :9], max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(answer["generated"], generated)
