"""Feed-forward width that matches parameter counts, for models with a known formula and for the real presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.config.load import load_config
from megatron_ext.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_ext.config.sweep_file import MatchParameters
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.planning.counts import ModelCounter
from megatron_ext.planning.matching import matched_width, set_ffn_width
from megatron_ext.utils.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALLER = "give a smaller match_parameters.multiple_of"
TO_FULL = MatchParameters(axis="mixer", to="full")


def config(tensor: int = 1) -> RunConfig:
    model, parallel = ModelConfig(ffn_hidden_size=100), ParallelConfig(tensor=tensor)
    return RunConfig(data=DataConfig(path="none"), model=model, parallel=parallel)


def affine(base: int, slope: int) -> Callable[[RunConfig], int]:
    return lambda config: base + slope * (config.model.ffn_hidden_size or 0)


@pytest.mark.parametrize(
    ("target", "multiple", "tensor", "width"),
    [
        (50_000, 8, 1, 400),
        (50_390, 8, 1, 400),
        (50_410, 8, 1, 408),
        (50_410, 1, 1, 404),
        (50_700, 8, 3, 408),  # a multiple of 8 * 3
        (50_000, 64, 2, 384),
    ],
)
def test_the_nearest_width(target: int, multiple: int, tensor: int, width: int) -> None:
    match = MatchParameters(axis="mixer", to="full", multiple_of=multiple, within=0.05)
    assert matched_width(config(tensor), "full", target, match, affine(10_000, 100)) == width


@pytest.mark.parametrize(
    ("target", "found", "away", "hint"),
    [
        (10_500, "10,800 parameters, with model.ffn_hidden_size=8,", "2.86%", "make the mixer smaller"),
        (11_950, "11,600 parameters, with model.ffn_hidden_size=16,", "2.93%", SMALLER),
    ],
)
def test_match_outside_tolerance(target: int, found: str, away: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        matched_width(config(), "full", target, TO_FULL, affine(10_000, 100))
    assert str(caught.value) == (
        f"match_parameters: {found} are nearest to the {target:,} of full, {away} away; "
        f"{hint}, or a match_parameters.within above 0.01"
    )


def test_model_without_feed_forward() -> None:
    with pytest.raises(UserError, match=r"model\.block transformer has no feed-forward whose width could match"):
        matched_width(config(), "full", 10_500, TO_FULL, affine(10_000, 0))


@pytest.mark.parametrize("size", ["110m_2k", "1p3b_100k"])
def test_widths_of_the_presets(counter: ModelCounter, size: str) -> None:
    """The presets' widths were chosen by hand so that the layers match the Transformer++'s parameters within 2 %."""
    presets = EXAMPLES / "mixers" / size.partition("_")[0]
    whole = load_config(EXAMPLES / f"{size}.yaml", [str(presets / "attention.yaml")], load_all())
    target = counter(whole).parameters
    match = MatchParameters(axis="mixer", to="attention", multiple_of=64, within=0.02)
    for path in presets.iterdir():
        preset = load_config(EXAMPLES / f"{size}.yaml", [str(path)], load_all())
        width = matched_width(preset, "attention", target, match, lambda config: counter(config).parameters)
        assert abs(width - (preset.model.ffn_hidden_size or 0)) <= 64, path
        found = counter(set_ffn_width(preset, width)).parameters
        assert abs(found - target) <= abs(counter(preset).parameters - target), path
