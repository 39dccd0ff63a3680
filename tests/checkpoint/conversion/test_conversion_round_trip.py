"""From a run's checkpoint, whatever its layout, to Hugging Face and back: the same answers, the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved_runs
import torch

from megatron_ext.mixers.registry import load_all

pytestmark = pytest.mark.slow

TP2, PP2, TP2_PP2 = {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}
LAYOUTS = pytest.mark.parametrize("parallel", [TP2, PP2, TP2_PP2], ids=["tp2_sp", "pp2", "tp2_pp2"])
Fixture = Callable[..., Any]


def models_of_all_mixers() -> list[str]:
    """Every mixer in a model of four layers."""
    names = sorted(load_all())
    names += ["attention"] * (-len(names) % 4)
    return [",".join(names[i : i + 4]) for i in range(0, len(names), 4)]


def there_and_back(
    run: Path, convert: Fixture, folder: Path, pattern: str, model: dict[str, Any], mixers: dict[str, Any], length: int
) -> str:
    """Convert, compare with transformers' own loading, convert back, compare bits; the architecture."""
    import transformers

    hf, back, again = folder / "hf", folder / "back", folder / "again"
    assert convert(run, hf, "--to", "hf", "--no-verify") == 0
    tokens = saved_runs.tokens(length)
    (architecture,) = json.loads((hf / "config.json").read_text())["architectures"]
    # Where flash-linear-attention has been imported, the automatic class takes its models in place of some.
    library = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    theirs = library.from_pretrained(hf, dtype=torch.float32, trust_remote_code=True).eval()
    with torch.no_grad():
        answer = theirs(input_ids=tokens, use_cache=False).logits
    with saved_runs.loaded(run, pattern, model, mixers) as ours:
        expected, before = saved_runs.logits(ours, tokens), saved_runs.parameters(ours)
    assert float(expected.std()) > 0.1
    assert float((answer - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert convert(hf, back, "--to", "megatron", "--verify") == 0
    with saved_runs.loaded(back, pattern, model, mixers, multiple=4) as ours:
        after = saved_runs.parameters(ours)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert convert(back, again, "--to", "hf", "--no-verify") == 0
    assert (again / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    return str(architecture)


@LAYOUTS
@pytest.mark.parametrize("pattern", models_of_all_mixers())
def test_every_mixer(
    pattern: str, parallel: dict[str, Any], saved_run: Fixture, convert: Fixture, tmp_path: Path
) -> None:
    run = saved_run(pattern, parallel)
    assert there_and_back(run, convert, tmp_path, pattern, {}, {}, 32) == "SelectronForCausalLM"


@LAYOUTS
@pytest.mark.parametrize(
    "model",
    [{"num_query_groups": 2, "head_dim": 24}, {"tie_embeddings": True, "rotary_base": 5e5, "norm_epsilon": 1e-3}],
    ids=["gqa", "tied"],
)
def test_transformer_and_llama(
    model: dict[str, Any], parallel: dict[str, Any], saved_run: Fixture, convert: Fixture, tmp_path: Path
) -> None:
    run = saved_run("attention*2", parallel, model)
    assert there_and_back(run, convert, tmp_path, "attention*2", model, {}, 32) == "LlamaForCausalLM"


@pytest.mark.parametrize("mixer", ["mamba", "mamba2"])
def test_mamba_and_transformers_models(mixer: str, saved_run: Fixture, convert: Fixture, tmp_path: Path) -> None:
    model, pattern = {"block": "mixer"}, f"{mixer}*2"
    architecture = {"mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM"}[mixer]
    run = saved_run(pattern, TP2_PP2, model)
    assert there_and_back(run, convert, tmp_path, pattern, model, {}, 32) == architecture


RWKV7 = {"block": "rwkv7", "normalization": "layer_norm"}


@pytest.mark.parametrize(
    ("mixer", "model"), [("gla", {}), ("deltanet", {}), ("gated_deltanet", {}), ("rwkv7", RWKV7)], ids=str
)
def test_bits_of_models_of_flash_linear_attention(
    mixer: str, model: dict[str, Any], saved_run: Fixture, convert: Fixture, tmp_path: Path
) -> None:
    run, pattern = saved_run(f"{mixer}*2", TP2_PP2, model), f"{mixer}*2"
    assert convert(run, tmp_path / "hf", "--to", "hf") == 0
    assert convert(tmp_path / "hf", tmp_path / "back", "--to", "megatron") == 0
    with saved_runs.loaded(run, pattern, model, {}) as ours:
        before = saved_runs.parameters(ours)
    with saved_runs.loaded(tmp_path / "back", pattern, model, {}, multiple=4) as ours:
        after = saved_runs.parameters(ours)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_types(saved_run: Fixture, convert: Fixture, tmp_path: Path) -> None:
    """bf16 stays what it is; fp32 is rounded once."""
    from safetensors.torch import load_file

    bf16, fp32 = (saved_run("attention*2", {"tensor": 2}, precision=name) for name in ("bf16", "fp32"))
    assert convert(bf16, tmp_path / "same", "--to", "hf") == 0
    assert convert(fp32, tmp_path / "rounded", "--to", "hf", "--dtype", "bf16") == 0
    assert convert(fp32, tmp_path / "whole", "--to", "hf") == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "same" / "model.safetensors").values()} == {torch.bfloat16}
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert all(torch.equal(rounded[name], whole[name].bfloat16()) for name in whole)
    assert convert(fp32, tmp_path / "half", "--to", "megatron", "--dtype", "fp16") == 2
