"""Round trip from a run's checkpoint of any layout to Hugging Face and back: equal logits and bit-identical tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved_runs
import torch
from built_in import MIXERS
from covering import cases

from megatron_ext.conversion.huggingface.families.selectron import PARAMETERS

pytestmark = pytest.mark.slow

TP2, PP2, TP2_PP2 = {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}
LAYOUTS = {"tp2_sp": TP2, "pp2": PP2, "tp2_pp2": TP2_PP2}
Fixture = Callable[..., Any]


def models_of_all_mixers() -> list[str]:
    """Patterns of eight-layer models that cover every mixer with code for transformers."""
    assert set(PARAMETERS) >= MIXERS
    names = sorted(PARAMETERS)
    names += ["attention"] * (-len(names) % 8)
    return [",".join(names[i : i + 8]) for i in range(0, len(names), 8)]


@torch.no_grad()
def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert float(expected.std()) > 0.1
    return float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def convert_there_and_back(
    run: Path, convert: Fixture, folder: Path, pattern: str, model: dict[str, Any], mixers: dict[str, Any], length: int
) -> str:
    """Convert, compare with the model that transformers loads, convert back, compare bits. Return the architecture."""
    import transformers

    hf, back, second_hf = folder / "hf", folder / "back", folder / "second_hf"
    assert convert(run, hf, "--to", "hf", "--no-verify") == 0
    tokens = saved_runs.tokens(length)
    (architecture,) = json.loads((hf / "config.json").read_text())["architectures"]
    # If flash-linear-attention has been imported, the auto class prefers its models for some architectures.
    library = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    theirs = library.from_pretrained(hf, dtype=torch.float32, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = theirs(input_ids=tokens, use_cache=False).logits
    with saved_runs.loaded(run, pattern, model, mixers) as ours:
        expected, before = saved_runs.logits(ours, tokens), saved_runs.parameters(ours)
    assert is_close(logits, expected)
    assert convert(hf, back, "--to", "megatron", "--verify") == 0
    with saved_runs.loaded(back, pattern, model, mixers, multiple=4) as ours:
        after = saved_runs.parameters(ours)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert convert(back, second_hf, "--to", "hf", "--no-verify") == 0
    assert (second_hf / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    return str(architecture)


# Checkpoints of all layouts contain the same tensors, sharded differently. One model per layout covers the shardings.
@pytest.mark.parametrize(
    ("pattern", "layout"),
    cases(
        every=[(pattern, layout) for pattern in models_of_all_mixers() for layout in LAYOUTS],
        default=[(pattern, "tp2_sp") for pattern in models_of_all_mixers()],
    ),
)
def test_every_mixer(pattern: str, layout: str, saved_run: Fixture, convert: Fixture, tmp_path: Path) -> None:
    run = saved_run(pattern, LAYOUTS[layout])
    assert convert_there_and_back(run, convert, tmp_path, pattern, {}, {}, 32) == "SelectronForCausalLM"


GROUPED = {"num_query_groups": 2, "head_dim": 24}
TIED = {"tie_embeddings": True, "rotary_base": 5e5, "norm_epsilon": 1e-3}  # one weight on two stages


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(
        every=[(name, layout) for name in ("gqa", "tied") for layout in LAYOUTS],
        default=[("gqa", "tp2_pp2"), ("tied", "pp2")],
    ),
)
def test_transformer_and_llama(name: str, layout: str, saved_run: Fixture, convert: Fixture, tmp_path: Path) -> None:
    model = {"gqa": GROUPED, "tied": TIED}[name]
    run = saved_run("attention*2", LAYOUTS[layout], model)
    assert convert_there_and_back(run, convert, tmp_path, "attention*2", model, {}, 32) == "LlamaForCausalLM"


@pytest.mark.parametrize("mixer", ["mamba", "mamba2"])
def test_mamba_and_transformers_models(mixer: str, saved_run: Fixture, convert: Fixture, tmp_path: Path) -> None:
    model, pattern = {"block": "mixer"}, f"{mixer}*2"
    architecture = {"mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM"}[mixer]
    run = saved_run(pattern, TP2, model)
    assert convert_there_and_back(run, convert, tmp_path, pattern, model, {}, 32) == architecture


# Sizes, settings and architecture of each model of flash-linear-attention. Its NSA shares a key among 16 heads.
SHARED = {"num_attention_heads": 32, "num_query_groups": 2, "head_dim": 4}
FLA_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gla": ({}, {}, "GLAForCausalLM"),
    "deltanet": ({}, {}, "DeltaNetForCausalLM"),
    "gated_deltanet": ({}, {}, "GatedDeltaNetForCausalLM"),
    "nsa": (SHARED, {"block_size": 4, "num_selected": 4, "window": 5}, "NSAForCausalLM"),
    "rwkv7": ({"block": "rwkv7", "normalization": "layer_norm"}, {}, "RWKV7ForCausalLM"),
}


@pytest.mark.parametrize("mixer", FLA_MODELS)
def test_models_of_flash_linear_attention(
    mixer: str, peer: Fixture, saved_run: Fixture, convert: Fixture, tmp_path: Path
) -> None:
    """The converted folder gives equal logits in fla's own model. Conversion back is bit-identical."""
    from safetensors.torch import load_file

    (model, settings, architecture), pattern = FLA_MODELS[mixer], f"{mixer}*2"
    run, mixers = saved_run(pattern, TP2, model, {mixer: settings}), {mixer: settings}
    assert convert(run, tmp_path / "hf", "--to", "hf") == 0
    assert convert(tmp_path / "hf", tmp_path / "back", "--to", "megatron") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    theirs, tokens = peer(config), saved_runs.tokens(32)
    theirs.load_state_dict(load_file(tmp_path / "hf" / "model.safetensors"))
    with saved_runs.loaded(run, pattern, model, mixers) as ours:
        before, expected = saved_runs.parameters(ours), saved_runs.logits(ours, tokens)
    assert is_close(theirs(tokens, use_cache=False).logits, expected)
    with saved_runs.loaded(tmp_path / "back", pattern, model, mixers, multiple=4) as ours:
        after = saved_runs.parameters(ours)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("mixer", FLA_MODELS)
def test_models_saved_by_flash_linear_attention(
    mixer: str, peer: Fixture, saved_run: Fixture, convert: Fixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model that fla itself saved. RWKV-7 has a value residual unless it is turned off."""
    (model, settings, _), pattern = FLA_MODELS[mixer], f"{mixer}*2"
    run = saved_run(pattern, TP2, model, {mixer: settings})
    assert convert(run, tmp_path / "hf", "--to", "hf", "--no-verify") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config.pop("selectron", None)  # only our exports have it
    torch.manual_seed(5)
    theirs, tokens = peer(config), saved_runs.tokens(32)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:  # many are initialized with zeros
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    if mixer == "rwkv7":
        capsys.readouterr()
        assert convert(tmp_path / "theirs", tmp_path / "run", "--to", "megatron") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == (
            "selectron: error: model.layers.1.attn.v_lora.lora.0.weight: mixes the first layer's values into this "
            "layer's (value residual), which is not supported; only models with it disabled are "
            "supported: biases -256, weights 0"
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "theirs"]
        for name, parameter in theirs.named_parameters():
            if "v_lora" in name:
                torch.nn.init.constant_(parameter, -256.0 if name.endswith("bias") else 0.0)
        theirs.save_pretrained(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "run", "--to", "megatron") == 0
    with saved_runs.loaded(tmp_path / "run", pattern, model, {mixer: settings}, multiple=4) as ours:
        found = saved_runs.logits(ours, tokens)
    assert is_close(found, theirs(tokens, use_cache=False).logits)


def test_dtypes(saved_run: Fixture, convert: Fixture, tmp_path: Path) -> None:
    """bf16 stays unchanged, and fp32 is rounded once."""
    from safetensors.torch import load_file

    bf16, fp32 = (saved_run("attention*2", {"tensor": 2}, precision=name) for name in ("bf16", "fp32"))
    assert convert(bf16, tmp_path / "same", "--to", "hf") == 0
    assert convert(fp32, tmp_path / "rounded", "--to", "hf", "--dtype", "bf16") == 0
    assert convert(fp32, tmp_path / "fp32", "--to", "hf") == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "same" / "model.safetensors").values()} == {torch.bfloat16}
    unrounded = load_file(tmp_path / "fp32" / "model.safetensors")
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert all(torch.equal(rounded[name], unrounded[name].bfloat16()) for name in unrounded)
    assert convert(fp32, tmp_path / "half", "--to", "megatron", "--dtype", "fp16") == 2
