"""Check of a conversion: it accepts correct models, even ill-conditioned ones, and detects faults of 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.conversion.core import tolerance, verify
from megatron_ext.conversion.core.opening import open_source
from megatron_ext.conversion.core.our_model import compute_logits
from megatron_ext.conversion.core.source import Source, SourceOptions
from megatron_ext.conversion.core.tensors import Tensors, TransformedTensors
from megatron_ext.mixers.core import rotary

pytest.importorskip("transformers", reason="transformers is not installed")

DEEP_MAMBA = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 24, "expand": 2, "conv_kernel": 4}
LLAMA = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 1, "head_dim": 32}
LLAMA |= {"num_key_value_heads": 1}


def _theirs(folder: Path, name: str, **fields: Any) -> Source:
    """Save a model of transformers with large weights, and open it."""
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=50, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in key and "embed" not in key:
                torch.nn.init.normal_(parameter, std=0.7 if name == "Mamba" else 0.4)
    model.save_pretrained(folder)
    return open_source(folder, SourceOptions())


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Model of 24 layers that amplify their input."""
    return _theirs(tmp_path_factory.mktemp("mamba"), "Mamba", **DEEP_MAMBA)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Model of 8 layers for 8,192 tokens."""
    return _theirs(tmp_path_factory.mktemp("llama"), "Llama", max_position_embeddings=8192, **LLAMA)


def _compare(monkeypatch: pytest.MonkeyPatch, source: Source, length: int, fault: Tensors | None = None) -> str:
    """Compare a model of transformers with ours, built from the same or faulty tensors."""
    original = verify.logits

    def logits(checkpoint: Any, tensors: Tensors, tokens_bt: torch.Tensor) -> torch.Tensor:
        if checkpoint is source:
            return original(source, tensors, tokens_bt)
        return compute_logits(source.saved, fault or source.tensors, tokens_bt)

    monkeypatch.setattr(verify, "logits", logits)
    return verify._compare_logits(source, _Written(source), source.tensors, length)  # type: ignore[arg-type]


class _Written:
    """Fake of a written checkpoint with the attributes that the comparison of logits reads."""

    def __init__(self, source: Source) -> None:
        self.path, self.tensors = Path("written"), source.tensors


def _with_fault(source: Source, name: str) -> Tensors:
    """Return the tensors of a source, with the named tensor of the middle layer multiplied by 1 + 1e-4."""
    keys = [key for key in source.tensors.infos() if key.endswith(name)]
    wrong = keys[len(keys) // 2]
    return TransformedTensors(source.tensors, lambda key, tensor: tensor * (1 + 1e-4) if key == wrong else tensor)


def test_a_deep_model_that_amplifies_rounding_is_not_refused(mamba: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at 12 tokens" in _compare(monkeypatch, mamba, 12)


@pytest.mark.parametrize("name", ["A_log", "D", "in_proj.weight", "input_layernorm.weight"])
def test_a_fault_in_a_deep_model_is_found(name: str, mamba: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        verify.UserError, match=r"^written: logits differ from those of .* at 12 tokens, more than 1e-08"
    ):
        _compare(monkeypatch, mamba, 12, _with_fault(mamba, name))


def test_lengths_are_limited_by_the_model_and_by_memory_and_time() -> None:
    def lengths_of(positions: int | None, heads: int = 8, hidden: int = 512, parameters: int = 10**8) -> list[int]:
        from types import SimpleNamespace

        sizes = SimpleNamespace(
            max_position_embeddings=positions, num_attention_heads=heads, hidden_size=hidden, pattern=""
        )
        return tolerance.comparison_lengths(SimpleNamespace(model=sizes), parameters)  # type: ignore[arg-type]

    assert lengths_of(64) == [64]
    assert lengths_of(160) == [160]
    assert lengths_of(None) == [160]
    assert lengths_of(2048) == [160, 2048]
    assert lengths_of(131072, heads=1) == [160, 8192]
    assert lengths_of(131072, heads=32) == [160, 2896]
    assert lengths_of(131072, parameters=7 * 10**9) == [160, 1428]
    assert lengths_of(131072, hidden=8192, parameters=10**12) == [160]


# Longer texts amplify rounding, but the time grows with the square of the length.
@pytest.mark.parametrize("length", [512, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_long_text_of_a_llama(length: int, llama: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        assert f"at {length} tokens" in _compare(patch, llama, length)
    with monkeypatch.context() as patch:
        # Same value with different rounding.
        patch.setattr(rotary, "frequencies", lambda d, base: base ** (-torch.arange(0, d, 2).float() / d))
        with pytest.raises(verify.UserError, match="logits differ"):
            _compare(patch, llama, length)
