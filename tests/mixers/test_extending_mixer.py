"""The example of docs/extending/mixer.md, registered in this process alone, at every place that lists mixers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest
import torch
from extending import code_blocks
from torch import Tensor

from megatron_ext.bench.layers import ours
from megatron_ext.bench.layers.cases import LayerPlan, LayerShape, Size
from megatron_ext.bench.layers.run import _empty_rows
from megatron_ext.commands import op_choices
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.huggingface.families import choose_family
from megatron_ext.evaluation.decoding import with_decode_caches
from megatron_ext.mixers.core import registry
from megatron_ext.mixers.core.settings import default_settings
from megatron_ext.planning import weightless
from megatron_ext.platform.device import Platform
from megatron_ext.utils.errors import UserError

CPU = Platform(torch.device("cpu"), "gloo")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that the page's code defines. The mixer is removed from the registry after the test."""
    monkeypatch.setattr(registry, "MIXERS", dict(registry.load_all()))
    (code,) = code_blocks("mixer.md")
    module = ModuleType("ema")
    monkeypatch.setitem(sys.modules, "ema", module)  # pydantic resolves annotations there
    exec(compile(code, "mixer.md", "exec"), vars(module))
    return vars(module)


def test_op_equals_recurrence(page: dict[str, Any]) -> None:
    x, state = torch.randn(2, 13, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    keep = torch.rand_like(x)
    found, last = page["gated_average"](x, keep, state)
    for t in range(x.shape[1]):
        state = keep[:, t] * state + (1 - keep[:, t]) * x[:, t]
        torch.testing.assert_close(found[:, t], state)
    torch.testing.assert_close(last, state)


@pytest.mark.usefixtures("page")
def test_added_mixer_decodes_and_counts_flops(make_mixer: Callable[..., Any], hidden_states: Tensor) -> None:
    mixer = make_mixer("ema")
    assert mixer.num_parameters() == 4 * 24**2
    whole = mixer(hidden_states)[0]
    changed = hidden_states.clone()
    changed[8:] += 1
    torch.testing.assert_close(mixer(changed)[0][:8], whole[:8])
    with torch.no_grad(), with_decode_caches(mixer):
        pieces = [mixer(piece)[0] for piece in hidden_states.split([5, 1, 6, 1])]
    torch.testing.assert_close(torch.cat(pieces), whole)


@pytest.mark.usefixtures("page")
def test_added_mixer_works_everywhere(one_process: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    entry = registry.load_all()["ema"]
    defaults = asdict(entry.config_type())
    assert default_settings("ema") == defaults == {"gate_bias": 2.0, "output_gate": True}  # for labels

    file = tmp_path / "ema.yaml"
    file.write_text(
        "{model: {pattern: ema*2, hidden_size: 32, num_attention_heads: 2}, data: {path: x, seq_length: 8}}"
    )
    config = load_config(file, ["mixers.ema.output_gate=false"], registry.load_all())
    monkeypatch.setattr(weightless, "_single_process", lambda: (CPU, one_process))
    gated = load_config(file, [], registry.load_all())
    fewer, more = (weightless.count(each, 100).parameters for each in (config, gated))
    assert more - fewer == 2 * 32 * 32

    saved = SavedModel(
        model=ModelConfig(pattern="ema*2"), layers=("ema", "ema"), mixers={}, vocab_size=100, seq_length=8
    )
    with pytest.raises(UserError, match=r"SelectronForCausalLM: it has no ema layers; .*docs/extending/mixer\.md"):
        choose_family(saved)

    assert op_choices._choices("ema", CPU, one_process) == []


@pytest.mark.usefixtures("page")
def test_added_mixer_is_benchmarked_without_peer(one_process: Any, tmp_path: Any) -> None:
    shape = LayerShape(size_name="110m", size=Size(hidden=32, heads=2, head_dim=16), length=9, batch=2)
    plan = LayerPlan(mixers=("ema",), shapes=(shape,), peers=("fla",), repeat=1, seed=5, output=tmp_path)
    assert [row.maker for row in _empty_rows(plan)] == ["ours"]
    assert ours.check(ours.build("ema", shape, CPU, one_process, 1), shape, 1, CPU.device).failure is None
