"""The command `selectron fit`, called as by a user."""

from __future__ import annotations

import csv
import json
import shutil
import struct
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from analysis_synthetic import start_near_one_half

from megatron_ext.analysis.scaling.fit_output import write_fit
from megatron_ext.analysis.scaling.fitting import Options, ScalingFit, fit_all
from megatron_ext.analysis.scaling.law import ScalingLaw
from megatron_ext.analysis.scaling.points import read_points
from megatron_ext.cli import main
from megatron_ext.utils.errors import UserError

LAWS = {
    "attention": ScalingLaw(1.7, 400.0, 1500.0, 0.34, 0.36),
    "mamba/2 (new)": ScalingLaw(1.8, 300.0, 1200.0, 0.33, 0.35),
}


def write(path: Path, laws: dict[str, ScalingLaw], sizes: int = 5) -> Path:
    lines = ["params,tokens,loss,mixer"]
    for mixer, law in laws.items():
        for c in np.geomspace(1e19, 1e21, 4):
            for n in float(law.best_params(c)) * np.geomspace(0.4, 2.5, sizes):
                lines.append(f"{n},{c / 6 / n},{float(law.loss(n, c / 6 / n))},{mixer}")
    path.write_text("\n".join(lines) + "\n")
    return path


def without_mixer(path: Path) -> Path:
    path.write_text("\n".join(line.rsplit(",", 1)[0] for line in path.read_text().splitlines()) + "\n")
    return path


def size_of_picture(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack(">II", content[16:24])  # type: ignore[return-value]


def with_test_loss(path: Path) -> Path:
    """Add test losses to a file of points: a power of the training loss with noise, higher for the second mixer."""
    generator = np.random.default_rng(7)
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines[1:], start=1):
        loss, mixer = float(line.split(",")[2]), line.split(",")[3]
        factor = 1.2 if mixer == "attention" else 1.3
        lines[number] += f",{factor * loss**0.9 * np.exp(0.002 * generator.normal())}"
    path.write_text("\n".join([f"{lines[0]},test_loss", *lines[1:]]) + "\n")
    return path


@pytest.fixture(scope="module")
def two_mixers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Output folder and printed text of a fit of two mixers with test losses."""
    folder, printed = tmp_path_factory.mktemp("two_mixers"), StringIO()
    points = with_test_loss(write(folder / "points.csv", LAWS))
    with start_near_one_half(), redirect_stdout(printed):
        assert main(["fit", str(points), "--output", str(folder / "fit")]) == 0
    return folder / "fit", printed.getvalue()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> ScalingFit:
    """Fit of a single law, for tests of the output folder."""
    points = tmp_path_factory.mktemp("one_law") / "points.csv"
    with start_near_one_half():
        return fit_all(read_points(without_mixer(write(points, {"a": LAWS["attention"]}))), "points", Options())


def test_one_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = without_mixer(write(tmp_path / "points.csv", {"attention": LAWS["attention"]}))
    output = tmp_path / "new" / "fit"
    former = ["--bootstrap", "1000", "--seed", "3"]  # options of the former bootstrap
    assert main(["fit", str(points), "--output", str(output), "--json", *former]) == 0
    printed = capsys.readouterr()
    for option in ("--bootstrap", "--seed"):
        assert f"warning: {option} has no effect: intervals are computed without random draws\n" in printed.err
    results = json.loads(printed.out)
    files = {"files": ["scaling.png", "scaling.csv", "isoflop.png", "isoflop.csv"]}
    assert results | files == json.loads((output / "fit.json").read_text())
    law = LAWS["attention"]
    for name in ("E", "A", "B", "alpha", "beta"):
        assert results[name] == pytest.approx(getattr(law, name), rel=1e-4)
        low, high = results["intervals"][name]
        assert low <= high == pytest.approx(results[name], rel=1e-2)
    assert 0 <= results["objective"] < 1e-10
    assert results["points"] == 20
    assert results["noise"] < 1e-5
    assert results["params_exponent"] == pytest.approx(law.beta / (law.alpha + law.beta), abs=1e-4)
    for interval in (
        results["intervals"]["params_exponent"],
        results["isoflop"]["params_of_flops"]["exponent_interval"],
    ):
        assert len(interval) == 2
    assert results["back_test"]["held_out"] == 2
    assert results["back_test"]["largest_error"] < 1e-4
    assert len(results["isoflop"]["budgets"]) == 4
    assert results["isoflop"]["params_of_flops"]["exponent"] == pytest.approx(
        law.beta / (law.alpha + law.beta), abs=0.01
    )
    assert sorted(path.name for path in output.iterdir()) == sorted(["fit.json", "fit.md", *files["files"]])
    assert min(size_of_picture(output / "scaling.png")) > 600


@pytest.mark.usefixtures("unpainted")
def test_the_published_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Besiroglu et al. 2024 report E 1.8169, alpha 0.3478 and beta 0.3659 without the five highest losses."""
    points = Path(__file__).with_name("chinchilla.csv")
    arguments = ["fit", str(points), "--drop-highest", "5", "--json"]
    assert main([*arguments, "--output", str(tmp_path / "fit")]) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert results["points"] == 240
    assert results["objective"] <= 0.0010183
    assert [round(results[name], 3) for name in ("E", "alpha", "beta")] == [1.817, 0.347, 0.367]
    assert (results["untold"], results["warnings"], printed.err) == ([], [], "fitting a law to 240 points\n")
    for name, (low, high) in results["intervals"].items():
        assert low < results[name] < high, name
    low, high = results["intervals"]["alpha"]
    assert 0.02 < high - low < 0.06  # 0.05 by the bootstrap of Besiroglu et al.


@pytest.mark.usefixtures("few_starts")
def test_the_surface_has_intervals(tmp_path: Path) -> None:
    """The surface spans the range of the points and extrapolates as far again, with wider intervals there."""
    points = without_mixer(write(tmp_path / "points.csv", {"attention": LAWS["attention"]}))
    generator, lines = np.random.default_rng(4), points.read_text().splitlines()
    for number, (n, d, loss) in enumerate((line.split(",") for line in lines[1:]), start=1):
        lines[number] = f"{n},{d},{float(loss) * np.exp(0.004 * generator.normal())}"
    points.write_text("\n".join(lines) + "\n")
    assert main(["fit", str(points), "--output", str(tmp_path / "fit")]) == 0
    with (tmp_path / "fit" / "scaling.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["what"] == "surface"]
    columns = ("params", "tokens", "flops", "loss", "low", "high")
    n, d, flops, loss, low, high = np.array([[float(row[name]) for name in columns] for row in rows]).T
    np.testing.assert_allclose(flops, 6 * n * d, rtol=1e-6)
    assert (len(set(n)), len(set(d)), len(rows)) == (40, 40, 1600)
    results = json.loads((tmp_path / "fit" / "fit.json").read_text())
    law = ScalingLaw(*(results[name] for name in ("E", "A", "B", "alpha", "beta")))
    np.testing.assert_allclose(loss, law.loss(n, d), rtol=1e-6)
    assert (low <= high).all()
    width = ((high - low) / loss).reshape(40, 40)
    assert width[0, 0] > 2 * width[15:25, 15:25].mean()
    assert min(size_of_picture(tmp_path / "fit" / "scaling.png")) > 600


def test_a_law_for_each_mixer(two_mixers: tuple[Path, str]) -> None:
    output, printed_text = two_mixers
    assert printed_text == (output / "fit.md").read_text() + "\n"
    assert "| attention | 20 | 1.7 (" in printed_text
    assert "Back-test: mamba/2 (new): the law without the 2 largest models (from " in printed_text
    assert (
        "IsoFLOP: attention: 4 of 4 budgets have a lowest loss among their sizes; the best number of param"
        in printed_text
    )
    assert list(json.loads((output / "fit.json").read_text())["mixers"]) == list(LAWS)
    assert min(size_of_picture(output / "scaling_mamba_2_new_.png")) > 600


@pytest.mark.usefixtures("unpainted")
def test_five_points_have_a_law_and_no_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    law = LAWS["attention"]
    sizes, tokens = (5e7, 2e8, 4e8, 1e9, 3e9), (4e9, 2e9, 3e10, 1e10, 2e11)
    lines = [f"{n},{d},{float(law.loss(n, d))}" for n, d in zip(sizes, tokens, strict=True)]
    (tmp_path / "points.csv").write_text("\n".join(["params,tokens,loss", *lines]))
    arguments = ["fit", str(tmp_path / "points.csv"), "--output", str(tmp_path / "fit")]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "(unknown)" in printed.out
    reason = "5 points for 5 constants leave no residual to estimate the noise: no intervals"
    assert f"warning: {tmp_path / 'points.csv'}: {reason}\n" in printed.err
    assert f"Warning: {reason}.\n" in printed.out
    results = json.loads((tmp_path / "fit" / "fit.json").read_text())
    assert results["objective"] < 1e-10
    assert results["back_test"] is None
    assert set(results["intervals"].values()) == {None}


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_ends_that_points_do_not_bound_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six points with 2 % noise give alpha no upper bound."""
    law, dice = LAWS["attention"], np.random.default_rng(1)
    n, d = np.array([1e8, 1e8, 4e8, 1.6e9, 1.6e9, 6e9]), np.array([2e9, 6e10, 1e10, 4e9, 1.2e11, 3e10])
    losses = law.loss(n, d) * np.exp(0.02 * dice.normal(size=6))
    lines = [f"{a},{b},{float(c)}" for a, b, c in zip(n, d, losses, strict=True)]
    (tmp_path / "points.csv").write_text("\n".join(["params,tokens,loss", *lines]))
    assert main(["fit", str(tmp_path / "points.csv"), "--output", str(tmp_path / "fit")]) == 0
    interval = json.loads((tmp_path / "fit" / "fit.json").read_text())["intervals"]["alpha"]
    assert interval[1] is None
    assert "(at least " in capsys.readouterr().out or interval[0] is None


def test_test_loss_over_training_loss(two_mixers: tuple[Path, str]) -> None:
    output, printed_text = two_mixers
    results = json.loads((output / "fit.json").read_text())
    for mixer, factor in zip(LAWS, (1.2, 1.3), strict=True):
        line = results["mixers"][mixer]["test_loss"]
        assert line["exponent"] == pytest.approx(0.9, abs=0.02)
        assert line["factor"] == pytest.approx(factor, rel=0.02)
        assert line["deviation"] == pytest.approx(0.002, rel=0.5)
        assert f"Test loss: {mixer}: {line['factor']:.4g} * loss^{line['exponent']:.4g} (exponent 0." in printed_text
    (difference,) = results["test_loss_differences"]
    assert (difference["mixer"], difference["other"]) == tuple(LAWS)
    assert difference["p_value"] < 1e-9
    assert difference["interval"][0] < 1.3 / 1.2 < difference["interval"][1]
    assert (
        f"| attention | mamba/2 (new) | {difference['p_value']:.2g} | {difference['train_loss']:.4g} | +8."
        in printed_text
    )
    assert min(size_of_picture(output / "test_loss.png")) > 600


@pytest.mark.usefixtures("few_starts")
def test_losses_that_do_not_fall_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n, d = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 4), np.geomspace(1e9, 1e11, 4)))
    losses = 2 + 0.05 * np.log(n / 1e7) - 0.03 * np.log(d / 1e9)
    lines = ["params,tokens,loss", *(f"{a},{b},{c}" for a, b, c in zip(n, d, losses, strict=True))]
    (tmp_path / "points.csv").write_text("\n".join(lines))
    assert main(["fit", str(tmp_path / "points.csv"), "--output", str(tmp_path / "fit")]) == 0
    assert "Warning: an exponent is not above 0: loss does not fall with it" in capsys.readouterr().out
    assert min(size_of_picture(tmp_path / "fit" / "scaling.png")) > 600


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_a_folder_of_an_earlier_fit_keeps_none_of_its_pictures(tmp_path: Path, two_mixers: tuple[Path, str]) -> None:
    output = Path(shutil.copytree(two_mixers[0], tmp_path / "fit"))
    assert {path.name for path in output.glob("*.png")} == {
        "scaling_attention.png",
        "scaling_mamba_2_new_.png",
        "isoflop_attention.png",
        "isoflop_mamba_2_new_.png",
        "test_loss.png",
    }
    (output / "scaling_of_mine.png").touch()
    single = without_mixer(write(tmp_path / "one.csv", {"attention": LAWS["attention"]}))
    assert main(["fit", str(single), "--output", str(output)]) == 0
    assert {path.name for path in output.glob("*.png")} == {"scaling.png", "isoflop.png", "scaling_of_mine.png"}


@pytest.mark.parametrize("names", [["../../mine.png", "/etc/x.png", 7, "notes.csv"], "scaling.png", None])
def test_a_fit_removes_only_files_of_an_earlier_fit(tmp_path: Path, fitted: ScalingFit, names: object) -> None:
    output = tmp_path / "a" / "fit"
    output.mkdir(parents=True)
    (output / "notes.csv").touch()
    (tmp_path / "mine.png").touch()
    (output / "fit.json").write_text(json.dumps({"files": names}))
    write_fit(fitted, output)
    assert (tmp_path / "mine.png").exists()
    assert (output / "notes.csv").exists()


def test_points_of_an_earlier_fit_are_removed_unless_they_are_the_input(tmp_path: Path, fitted: ScalingFit) -> None:
    points = tmp_path / "points.csv"
    for keep, is_left in ((points, True), (None, False)):
        points.touch()
        (tmp_path / "fit.json").write_text(json.dumps({"files": ["points.csv"]}))
        write_fit(fitted, tmp_path, keep=keep)
        assert points.exists() == is_left


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_mixers_whose_names_differ_in_signs_have_pictures_of_their_own(tmp_path: Path) -> None:
    points = write(tmp_path / "points.csv", {"a/b": LAWS["attention"], "a b": LAWS["attention"]})
    assert main(["fit", str(points), "--output", str(tmp_path / "fit")]) == 0
    assert {path.name for path in (tmp_path / "fit").glob("scaling*.png")} == {"scaling_a_b.png", "scaling_a_b_2.png"}


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_the_points_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = without_mixer(write(tmp_path / "scaling.csv", {"attention": LAWS["attention"]}))
    before = points.read_bytes()
    assert main(["fit", str(points), "--output", str(tmp_path)]) == 2
    problem = "would be overwritten by a file of the fit; give another folder with --output"
    lines = ["fitting a law to 20 points", f"selectron: error: {points}: {problem}"]
    assert capsys.readouterr().err.splitlines() == lines
    assert list(tmp_path.iterdir()) == [points]
    assert points.read_bytes() == before


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_the_highest_losses_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = without_mixer(write(tmp_path / "points.csv", {"attention": LAWS["attention"]}))
    points.write_text(points.read_text() + "1e9,2e10,50\n")
    arguments = ["fit", str(points), "--output", str(tmp_path / "fit"), "--json"]
    assert main([*arguments, "--drop-highest", "1"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert (results["points"], results["objective"] < 1e-10) == (20, True)
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["objective"] > 1e-4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--drop-highest", "-1"], "--drop-highest: -1 is below 0; "),
        (
            ["--drop-highest", "17"],
            "points.csv: 3 points with distinct params or tokens, but the law has 5 constants; give 5 points or more",
        ),
    ],
)
def test_bad_options(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = without_mixer(write(tmp_path / "points.csv", {"attention": LAWS["attention"]}))
    assert main(["fit", str(points), "--output", str(tmp_path / "fit"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "fit").exists()


def test_a_mixer_without_a_law_stops_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = write(tmp_path / "points.csv", LAWS)
    points.write_text(points.read_text() + "1e9,2e10,3,rwkv7\n")
    assert main(["fit", str(points), "--output", str(tmp_path / "fit")]) == 2
    assert (
        "points.csv (rwkv7): 1 points with distinct params or tokens, but the law has 5 constants; "
        in capsys.readouterr().err
    )


def test_an_output_that_cannot_be_written(tmp_path: Path, fitted: ScalingFit) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/fit: cannot be written \(Not a directory\); give another folder"):
        write_fit(fitted, tmp_path / "file" / "fit")
