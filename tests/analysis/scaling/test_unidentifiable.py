"""Constants that the points do not determine, however small the noise: they are named and get no intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.analysis.scaling.law import Fit, ScalingLaw, evaluate_objective
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.uncertainty import compute_uncertainty
from megatron_ext.analysis.scaling.unidentifiable import CONSTANTS, unidentifiable
from megatron_ext.cli import main

LAW = ScalingLaw(1.7, 400.0, 1500.0, 0.34, 0.36)
SIZES, TOKENS = np.array([1e8, 4e8, 2e9, 9e9]), np.array([2e9, 8e9, 4e10, 3e11])
FEW_TOKENS = "two token counts: E, B and beta cannot be determined"
FEW_SIZES = "two sizes: E, A and alpha cannot be determined"


def grid(sizes: int, lengths: int, *, law: ScalingLaw = LAW, jitter: float = 0.0) -> Points:
    n, d = (x.ravel() for x in np.meshgrid(SIZES[:sizes], TOKENS[:lengths]))
    dice = np.random.default_rng(1)
    n, d = (x * np.exp(dice.uniform(-jitter, jitter, len(x))) for x in (n, d))
    return Points(n, d, law.loss(n, d))


@pytest.mark.parametrize("beta", [0.15, 0.73])
def test_two_numbers_of_tokens_have_many_laws(beta: float) -> None:
    """Two laws fit the points equally well, up to rounding, as the warning states."""
    points = grid(3, 2)
    ends = LAW.B * TOKENS[:2] ** -LAW.beta
    b = (ends[0] - ends[1]) / (TOKENS[0] ** -beta - TOKENS[1] ** -beta)
    other = ScalingLaw(LAW.E + ends[0] - b * TOKENS[0] ** -beta, LAW.A, b, LAW.alpha, beta)
    assert abs(other.E - LAW.E) > 0.1
    assert evaluate_objective(other, points) < 1e-25
    for law in (LAW, other):
        assert [str(one) for one in unidentifiable(Fit(law, 0.0, points))] == [FEW_TOKENS]


@pytest.mark.parametrize("jitter", [0.0, 0.02], ids=["exact", "rounded"])
@pytest.mark.parametrize(
    ("shape", "reasons", "unknown"),
    [
        ((3, 2), [FEW_TOKENS], ("E", "B", "beta")),
        ((2, 3), [FEW_SIZES], ("E", "A", "alpha")),
        ((3, 3), [], ()),
    ],
    ids=str,
)
def test_what_a_grid_does_not_tell(
    shape: tuple[int, int], reasons: list[str], unknown: tuple[str, ...], jitter: float
) -> None:
    uncertainty = compute_uncertainty(Fit(LAW, 0.0, grid(*shape, jitter=jitter)))
    assert [str(one) for one in uncertainty.unidentifiable] == reasons
    assert {name for name in CONSTANTS if np.isnan(uncertainty.interval(name)).any()} == set(unknown)
    band = uncertainty.band(SIZES, TOKENS)
    assert np.isnan(band).all() if unknown else (band[0] <= band[1]).all()


def test_a_term_that_is_not_there_says_nothing_of_its_constants() -> None:
    (one,) = unidentifiable(Fit(ScalingLaw(1.7, 1e-80, 1500.0, 0.34, 0.36), 0.0, grid(4, 4)))
    assert one.constants == ("A", "alpha")
    assert str(one) == "other values give the same losses to first order: A and alpha cannot be determined"


def test_a_term_that_does_not_fall_is_one_with_the_lowest_loss() -> None:
    (one,) = unidentifiable(Fit(ScalingLaw(1.7, 0.5, 1500.0, 0.0, 0.36), 0.0, grid(4, 4)))
    assert one.constants == ("E", "A")


def written(path: Path, points: Points) -> Path:
    rows = zip(points.params, points.tokens, points.losses, strict=True)
    path.write_text("\n".join(["params,tokens,loss", *(f"{n},{d},{float(loss)!r}" for n, d, loss in rows)]) + "\n")
    return path


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.usefixtures("few_starts", "unpainted")
@pytest.mark.parametrize(
    ("shape", "reasons", "unknown"),
    [((3, 2), FEW_TOKENS, ("E", "B", "beta")), ((2, 3), FEW_SIZES, ("E", "A", "alpha")), ((4, 4), "", ())],
    ids=str,
)
def test_the_command_says_so_everywhere(
    shape: tuple[int, int], reasons: str, unknown: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points, output = written(tmp_path / "points.csv", grid(*shape)), tmp_path / "fit"
    assert main(["fit", str(points), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.err.splitlines() if line.startswith("warning")] == (
        [f"warning: {points}: {reasons}"] if reasons else []
    )
    text = (output / "fit.md").read_text()
    assert (f"Warning: {reasons}.\n" in text) == bool(reasons)
    assert text.count("unknown)") == len(unknown) + (2 if unknown else 0)
    results = json.loads((output / "fit.json").read_text(), parse_constant=refused)
    assert {name for name in CONSTANTS if results["intervals"][name] is None} == set(unknown) == set(results["untold"])
    assert results["warnings"] == ([reasons] if reasons else [])
    assert results["objective"] < 1e-15
    surface = [row.split(",") for row in (output / "scaling.csv").read_text().splitlines() if row.startswith("surface")]
    assert len(surface) == 1600
    assert {row[5:] == ["", ""] for row in surface} == {bool(unknown)}
