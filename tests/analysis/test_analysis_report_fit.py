"""The command `selectron report --fit`: report and scaling laws of a sweep, and the page in a browser."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_synthetic import TOKENS_A_STEP, Synthetic, replace_drawing, write_run
from browser import Browser, missing
from covering import cases

from megatron_ext.analysis.scaling import law
from megatron_ext.analysis.style import LIGHT
from megatron_ext.cli import main

pytestmark = pytest.mark.usefixtures("few_starts_in_module")

LAWS = {
    "attention": law.ScalingLaw(1.7, 40.0, 1500.0, 0.5, 0.5),
    "mamba": law.ScalingLaw(1.8, 30.0, 1200.0, 0.5, 0.5),
}
EVERY = 20


def sweep(folder: Path, sizes: int = 4) -> Path:
    """Write runs of two budgets and several sizes for each mixer.

    Training losses follow the mixer's law at every step, and test losses have some noise.
    """
    dice = np.random.default_rng(3)
    for mixer, truth in LAWS.items():
        for budget in (480, 960):
            for size in range(sizes):
                params, steps = 1000 * 2**size, budget // 2**size

                def loss(step: Any, params: int = params, truth: law.ScalingLaw = truth) -> np.ndarray:
                    return truth.loss(params, TOKENS_A_STEP * np.asarray(step))

                run = Synthetic(
                    name=f"{mixer}-{budget}-{size}",
                    pattern=f"{mixer}*4",
                    steps=steps,
                    every=EVERY,
                    gap=float((0.03 if mixer == "mamba" else 0.0) + 0.001 * dice.normal()),
                    training_loss=loss,
                    config={"model": {"hidden_size": 16 * 2**size}},
                    size={"parameters": params, "embedding_parameters": 10, "output_layer_parameters": 10},
                )
                write_run(folder / run.name, run)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(tmp_path_factory.mktemp("sweep") / "runs")


@pytest.fixture(scope="module")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report in which fewer variants of pictures are drawn, because drawing takes most of the time.

    Pictures for phones are in light colors only. So are all variants of the second mixer's laws, and of the curves that
    tests of other reports draw.
    """
    output = tmp_path_factory.mktemp("out") / "report"
    with pytest.MonkeyPatch.context() as patch:
        replace_drawing(patch, lambda draw: lambda theme, stacked: draw(LIGHT if stacked else theme, stacked))
        light_only = {"training_loss", "matched_loss", "domain_loss", "scaling_mamba", "isoflop_mamba"}
        replace_drawing(patch, lambda draw: lambda _, stacked: draw(LIGHT, stacked), light_only)
        assert main(["report", str(runs), "--fit", "--output", str(output)]) == 0
    return output


@pytest.mark.usefixtures("unpainted")
def test_the_fit_is_that_of_the_command(runs: Path, written: Path, tmp_path: Path) -> None:
    """Compare numbers, those in pictures included. Both commands draw pictures by one function of these numbers."""
    assert main(["fit", str(runs), "--output", str(tmp_path / "fit")]) == 0
    names = {path.name for path in (tmp_path / "fit").iterdir()}
    assert names == {path.name for path in (written / "scaling").iterdir()}
    pictures = {"scaling_attention", "scaling_mamba", "isoflop_attention", "isoflop_mamba", "test_loss"}
    assert {f"{name}.{kind}" for name in pictures for kind in ("png", "csv")} < names
    for name in names:
        if not name.endswith(".png"):
            assert (tmp_path / "fit" / name).read_bytes() == (written / "scaling" / name).read_bytes(), name


def test_the_page_says_what_was_fitted(written: Path) -> None:
    page = " ".join((written / "index.html").read_text(encoding="utf-8").split())
    numbers = json.loads((written / "scaling" / "fit.json").read_text())
    for mixer in LAWS:
        for constant in ("E", "A", "B", "alpha", "beta"):
            assert f">{numbers['mixers'][mixer][constant]:.5g} <small>" in page
    assert "mamba differs from attention (p = " in page
    for anchor in ("curves", "matched", "domains", "scaling", "configurations", "history"):
        assert f'<h2 id="{anchor}">' in page
    assert "scaling/fit.json" in page


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_tables_hold_what_pictures_show(written: Path) -> None:
    for mixer, truth in LAWS.items():
        rows = rows_of(written / "scaling" / f"scaling_{mixer}.csv")
        assert sum(row["what"] == "point" for row in rows) == 8
        for row in rows:
            n, d, flops, loss = (float(row[name]) for name in ("params", "tokens", "flops", "loss"))
            assert flops == pytest.approx(6 * n * d, rel=1e-6)
            if row["what"] == "law":
                assert loss == pytest.approx(float(truth.loss(n, d)), rel=0.05)
                assert float(row["low"]) <= loss * (1 + 1e-6)
                assert loss <= float(row["high"]) * (1 + 1e-6)
        parabolas = rows_of(written / "scaling" / f"isoflop_{mixer}.csv")
        assert len({row["flops"] for row in parabolas}) == 2
        assert sum(row["what"] == "point" for row in parabolas) == 8
    lines = [row for row in rows_of(written / "scaling" / "test_loss.csv") if row["what"] == "line"]
    assert {row["mixer"] for row in lines} == set(LAWS)
    assert all(float(row["low"]) < float(row["test_loss"]) < float(row["high"]) for row in lines)


@pytest.mark.usefixtures("unpainted")
def test_runs_that_no_law_can_be_fitted_to(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = [str(runs / f"attention-480-{size}") for size in range(4)]
    assert main(["report", *few, "--fit", "--output", str(tmp_path / "report")]) == 2
    problem = "4 points with distinct params or tokens, but the law has 5 constants; give 5 points or more"
    assert capsys.readouterr().err == f"selectron: error: {', '.join(few)} (attention): {problem}\n"
    assert not (tmp_path / "report").exists()
    assert main(["report", *few, "--output", str(tmp_path / "report")]) == 0
    assert not (tmp_path / "report" / "scaling").exists()


@pytest.mark.usefixtures("unpainted")
def test_a_report_without_laws_takes_those_of_the_one_before_away(runs: Path, written: Path, tmp_path: Path) -> None:
    output = tmp_path / "report"
    shutil.copytree(written, output)
    fitted = {f"scaling/{path.name}" for path in (output / "scaling").iterdir()}
    assert fitted <= set(json.loads((output / "report.json").read_text())["files"])
    (output / "scaling" / "notes.txt").write_text("mine")
    few = [str(runs / f"attention-480-{size}") for size in range(2)]
    assert main(["report", *few, "--output", str(output)]) == 0
    assert [path.name for path in (output / "scaling").iterdir()] == ["notes.txt"]
    assert not any("scaling" in name for name in json.loads((output / "report.json").read_text())["files"])
    (output / "scaling" / "notes.txt").unlink()
    (output / "report.json").write_bytes((written / "report.json").read_bytes())
    (output / "scaling" / "fit.md").write_text("as of an earlier report")
    assert main(["report", *few, "--output", str(output)]) == 0
    assert not (output / "scaling").exists()


@pytest.mark.usefixtures("unpainted")
def test_laws_that_no_report_wrote_stay(runs: Path, tmp_path: Path) -> None:
    """Keep files that `selectron fit` may have written, and ignore recorded paths outside the report's folder."""
    output = tmp_path / "report"
    (output / "scaling").mkdir(parents=True)
    for name in ("scaling/fit.json", "points.csv", "notes.txt"):
        (output / name).write_text("{}")
    (tmp_path / "fit.json").write_text("{}")
    names = ["../fit.json", "scaling/../../fit.json", "points.csv", "notes.txt", 3]
    (output / "report.json").write_text(json.dumps({"files": names}))
    few = [str(runs / f"attention-480-{size}") for size in range(2)]
    assert main(["report", *few, "--output", str(output)]) == 0
    assert (tmp_path / "fit.json").exists()
    assert {"points.csv", "notes.txt", "scaling"} <= {path.name for path in output.iterdir()}
    assert (output / "scaling" / "fit.json").exists()


@pytest.mark.usefixtures("unpainted")
def test_a_sweep_without_a_common_training_loss_has_laws(runs: Path, tmp_path: Path) -> None:
    # One more run, from a law far above the others'.
    far = Synthetic(
        name="far",
        pattern="attention*4",
        steps=60,
        every=EVERY,
        training_loss=lambda step: 900.0 - np.asarray(step),
        config={"model": {"hidden_size": 8}},
        size={"parameters": 500, "embedding_parameters": 10, "output_layer_parameters": 10},
    )
    outlier = write_run(tmp_path / "far", far)
    assert main(["report", str(runs), str(outlier), "--fit", "--output", str(tmp_path / "report")]) == 0
    page = " ".join((tmp_path / "report" / "index.html").read_text(encoding="utf-8").split())
    assert "far was evaluated" not in page, "a baseline of another size has nothing to be compared with"
    assert '<h2 id="scaling">' in page


# --- in a browser ----------------------------------------------------------------------------------------------------

in_a_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "never")


@in_a_browser
@pytest.mark.parametrize(
    ("width", "scheme"),
    cases(
        every=[(1280, "light"), (390, "light"), (1280, "dark"), (390, "dark")], default=[(1280, "light"), (390, "dark")]
    ),
)
def test_the_page_in_a_browser(written: Path, window: Browser, width: int, scheme: str) -> None:
    window.show(width, scheme=scheme)
    window.open(written / "index.html")
    assert window.complaints() == []
    addresses = window.requests()
    assert (written / "index.html").as_uri() in addresses
    assert {url.partition(":")[0] for url in addresses} == {"file", "data"}
    assert [url for url in addresses if url.startswith("file:") and not url.endswith("/index.html")] == []
    widths = window.run("return [...document.images].map(i => i.complete ? i.naturalWidth : 0)")
    assert len(widths) == 4 + 5
    assert min(widths) > 500
    assert (max(widths) < 800) == (width < 640), "a phone gets the pictures that are made for it"
    page, screen = window.run("const d = document.documentElement; return [d.scrollWidth, d.clientWidth]")
    assert page <= screen <= width
    scrolled = window.run(
        "return [...document.querySelectorAll('.wide')].filter(d => d.scrollWidth > d.clientWidth).length"
    )
    assert scrolled > 0, "wide tables scroll inside their box"
    paper = window.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[scheme]
    assert window.run("return [...document.images].every(i => i.alt.length > 10)")


@in_a_browser
def test_the_contents_lead_to_every_section(written: Path, window: Browser) -> None:
    window.open(written / "index.html")
    links = window.run("return [...document.querySelectorAll('nav a')].map(a => a.hash)")
    sections = window.run("return [...document.querySelectorAll('h2')].map(h => '#' + h.id)")
    assert links == sections
    others = window.run("return [...document.links].map(a => a.getAttribute('href'))")
    assert set(others) <= set(links), "no link leads elsewhere"


COLUMN = """
const table = document.querySelector("#matched ~ .wide table");
return [...table.tBodies[0].rows].map(row => row.cells[arguments[0]].innerText)
"""

LOSS = 3
"""Column of the loss out of domain, after the architecture, its baseline and the matched loss."""


@in_a_browser
def test_a_click_on_a_column_sorts_by_number(written: Path, window: Browser) -> None:
    window.show(1280)
    window.open(written / "index.html")
    before = window.run(COLUMN, LOSS)
    button = f"#matched ~ .wide table th:nth-child({LOSS + 1}) button"
    assert before != sorted(before, key=float)
    window.press(button)
    assert window.run(COLUMN, LOSS) == sorted(before, key=float)
    window.press(button)
    assert window.run(COLUMN, LOSS) == sorted(before, key=float, reverse=True)
    window.press(
        f"#matched ~ .wide table th:nth-child({LOSS + 2}) button"
    )  # gaps are signed, and the baseline's counts as zero
    gaps = [cell.split()[0].replace("\u2212", "-") for cell in window.run(COLUMN, LOSS + 1)]
    values = [0.0 if gap == "baseline" else float(gap) for gap in gaps]
    assert values == sorted(values)
    assert len(set(values)) > 2
    window.press("#matched ~ .wide table th:nth-child(1) button")
    names = window.run(COLUMN, 0)
    assert names[0].startswith("attention")
    assert names[-1].startswith("mamba")


@in_a_browser
def test_sorting_by_number_is_not_by_text(written: Path, window: Browser) -> None:
    """Sort 60 before 120 as numbers, although not as text."""
    window.open(written / "index.html")
    window.press("#history ~ .wide table th:nth-child(2) button")
    script = "return [...document.querySelectorAll('#history ~ .wide table td:nth-child(2)')].map(d => d.innerText)"
    steps = [int(text.split()[0]) for text in window.run(script)][: 2 * 8]
    assert steps == sorted(steps)
    assert {60, 120, 960} <= set(steps)
