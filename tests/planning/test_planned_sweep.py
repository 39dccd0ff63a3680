"""Sweeps whose runs are derived from plans: the runs, errors and output."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from corpora import prepared
from launching import write_config

from megatron_ext.cli import main
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.sweep_file import MatchParameters, read_sweep
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.planning.counts import ModelCounter
from megatron_ext.planning.matching import set_ffn_width
from megatron_ext.planning.sweep import SweepRun, sweep_runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweeps" / "isoflop.yaml"
MIXERS = """
  mixer:
    full: {model.pattern: "attention*4"}
    delta: {model.pattern: "gated_deltanet*4"}
    mamba: {model.pattern: "mamba2*4", mixers.mamba2.state_size: 8}
"""
ISOFLOP = f"""
config: base.yaml
fields: {{model.hidden_size: 64, optimizer.warmup_steps: 0}}
axes:{MIXERS}
  plan.training_flops: [1e+10, 3.5e+10]
match_parameters: {{axis: mixer, to: full, multiple_of: 4}}
"""


@pytest.fixture
def base(tmp_path: Path, counter: ModelCounter, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a base configuration. Models are counted with 300 tokens by the shared process."""
    monkeypatch.setattr("megatron_ext.planning.sweep.ModelCounter", lambda: nullcontext(counter))
    write_config(tmp_path, tmp_path / "data", tmp_path / "runs").rename(tmp_path / "base.yaml")
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "planned.yaml"
    path.write_text(text)
    return path


def load(path: Path, overrides: list[str]) -> RunConfig:
    return load_config(path, overrides, load_all())


def runs_of(folder: Path, text: str, *more: str) -> dict[str, SweepRun]:
    return sweep_runs(written(folder, text), more, load, lambda config: None, listed=True)  # type: ignore[arg-type]


def test_runs_of_equal_compute_with_equal_parameters(base: Path, counter: ModelCounter) -> None:
    runs = runs_of(base, ISOFLOP)
    assert list(runs) == [f"{m}-training_flops{c}" for m in ("full", "delta", "mamba") for c in ("1e10", "3.5e10")]
    sizes = {}
    for name, run in runs.items():
        flops_of_step = counter(run.config).flops_per_token * 4 * 64  # 4 samples of 64 tokens
        budget = float(name.partition("flops")[2])
        assert abs(run.config.training.steps * flops_of_step - budget) <= flops_of_step / 2
        sizes[name] = counter(run.config).parameters
    assert runs["full-training_flops1e10"].config.model.ffn_hidden_size == 192  # 8/3 * 64, rounded up to 64 * n
    for name, size in sizes.items():
        target = sizes[f"full-{name.partition('-')[2]}"]
        assert size == pytest.approx(target, rel=0.01)
        width = runs[name].config.model.ffn_hidden_size
        assert width is not None
        others = [counter(set_ffn_width(runs[name].config, width + more)).parameters for more in (-4, 4)]
        assert abs(size - target) <= min(abs(other - target) for other in others)
    assert runs["delta-training_flops1e10"].config.model.ffn_hidden_size != 192


def test_derived_fields_are_part_of_run_configuration(base: Path) -> None:
    for name, run in runs_of(base, ISOFLOP).items():
        assert not [one for one in run.overrides if one.startswith("plan.")]
        again = load(base / "base.yaml", [*run.overrides, f"run.name={name}", f"run.dir={run.config.run.dir}"])
        assert again == run.config
        assert run.config.run.dir == str(base / "runs" / "planned")


def test_budget_in_tokens_and_tokens_per_parameter(base: Path, counter: ModelCounter) -> None:
    text = """
config: base.yaml
fields: {optimizer.schedule: wsd, plan.warmup_share: 0.05, plan.decay_share: 0.2}
axes: {size: {a: {plan.tokens_per_parameter: 2.0}}}
runs: {fixed: {training.steps: 40}, given: {plan.tokens: 25600}}
"""
    runs = runs_of(base, text)
    size = counter(runs["a"].config).parameters
    config_a = runs["a"].config
    assert abs(config_a.training.steps * 256 - 2 * size) <= 128
    assert config_a.optimizer.warmup_steps == round(0.05 * config_a.training.steps)
    assert config_a.optimizer.decay_steps == round(0.2 * config_a.training.steps)
    assert [runs[name].config.training.steps for name in ("given", "fixed")] == [100, 40]
    assert [runs[name].config.optimizer.decay_steps for name in ("given", "fixed")] == [20, 8]


def test_command_line_steps_determine_schedule(base: Path) -> None:
    text = "config: base.yaml\nfields: {plan.tokens: 25600, plan.warmup_share: 0.1}\naxes: {training.seed: [1, 2]}"
    assert [run.config.training.steps for run in runs_of(base, text).values()] == [100, 100]
    short = base / "short.yaml"
    short.write_text("training: {steps: 30}")
    for more in ("training.steps=30", str(short)):
        for run in runs_of(base, text, more).values():
            assert (run.config.training.steps, run.config.optimizer.warmup_steps) == (30, 3)
    (first, _) = runs_of(base, text, "plan.tokens=51200").values()  # the command line also overrides fields of the plan
    assert (first.config.training.steps, first.config.optimizer.warmup_steps) == (200, 20)


def test_named_runs_are_not_matched(base: Path) -> None:
    text = f"config: base.yaml\naxes:{MIXERS}\nruns: {{own: {{model.pattern: mamba2*4}}}}\n"
    text += "match_parameters: {axis: mixer, to: full, within: 0.2}"
    assert set(read_sweep(written(base, text)).reference_runs) == {"delta", "mamba"}
    runs = runs_of(base, text)
    widths = {name: run.config.model.ffn_hidden_size for name, run in runs.items()}
    assert widths["own"] == widths["full"] == 128
    assert widths["mamba"] != 128
    assert [name for name, run in runs.items() if run.counts is None] == ["own"]


def test_models_are_counted_only_if_needed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: RunConfig) -> None:
        raise AssertionError("a model is counted")

    monkeypatch.setattr("megatron_ext.planning.sweep.ModelCounter", lambda: nullcontext(never))
    text = "config: base.yaml\nfields: {plan.tokens: 25600}\naxes: {training.seed: [1]}"
    (run,) = sweep_runs(written(base, text), [], load, lambda config: None).values()  # type: ignore[arg-type]
    assert run.config.training.steps == 100


@pytest.mark.parametrize(
    ("text", "more", "line"),
    [
        (
            "axes: {plan.tokens: [1e5]}\nfields: {training.steps: 5}",
            [],
            "run tokens100000: training.steps: 5 is given, but follows from plan.tokens 100000; remove one of them",
        ),
        (
            "axes: {plan.tokens: [1e5]}",
            ["plan.training_flops=1e12"],
            "run tokens100000: plan.tokens: 100000 is given, but so is plan.training_flops 1e+12; give one of them",
        ),
        (
            "axes: {plan.training_flops: [1e3]}",
            [],
            "run training_flops1000: plan.training_flops: 1000 is less than the ",
        ),
        (
            "axes: {plan.tokens: [257]}",
            [],
            "run tokens257: optimizer.warmup_steps: 2 is not less than training.steps 1; give at most 0, or more steps "
            "(selectron train --trial scales the schedule for a short run)",
        ),
        (
            "axes: {plan.tokens: [1e5]}\nfields: {plan.decay_share: 0.1}",
            [],
            "run tokens100000: optimizer.decay_steps: 39, with optimizer.schedule cosine; set it to 0, or",
        ),
        (
            f"axes:{MIXERS}match_parameters: {{axis: mixer, to: full, within: 1e-9}}",
            [],
            "run delta: match_parameters: ",
        ),
        (
            f"axes:{MIXERS}match_parameters: {{axis: mixer, to: full, within: 0.1}}",
            ["model.ffn_hidden_size=128"],
            "run delta: model.ffn_hidden_size: 128 on the command line, but match_parameters sets it to ",
        ),
        (
            f"axes:{MIXERS}match_parameters: {{axis: mixer, to: full}}",
            ["model.block=mixer"],
            "run delta: match_parameters: a layer of model.block mixer has no feed-forward whose width could match",
        ),
        (
            f"axes:{MIXERS}match_parameters: {{axis: mixer, to: full}}",
            ["model.num_attention_heads=3"],
            "run full: model.num_attention_heads: model.hidden_size 32 is not divisible by 3 heads",
        ),
    ],
)
def test_invalid_sweep_plans(
    base: Path, capsys: pytest.CaptureFixture[str], text: str, more: list[str], line: str
) -> None:
    path = written(base, f"config: base.yaml\n{text}")
    assert main(["sweep", str(path), "--local", "1", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"selectron: error: {path}: {line}")
    assert error.count("\n") == 1
    assert not (base / "runs").exists()


def test_dry_run_table(base: Path, counter: ModelCounter, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(base, "config: base.yaml\nfields: {plan.tokens: 25600}\naxes: {training.seed: [1]}\nruns: {b: {}}")
    assert main(["sweep", str(path), "--dry-run"]) == 0
    config = load(base / "base.yaml", [])
    size, flops = counter(config).parameters, counter(config).flops_per_token * 25600
    row = f"{size:,} | 100 | 25,600 | {flops:.3e}"
    assert capsys.readouterr().out.splitlines() == [
        "| run | parameters | steps | tokens | training FLOPs | fields |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| seed1 | {row} | training.seed=1 training.steps=100 |",
        f"| b | {row} | training.steps=100 |",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_counting_process")
def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Embeddings have 50,048 rows, as with a tokenizer of that size."""
    data = prepared(tmp_path, documents=60)
    more = [f"data.path={data}", "model.vocab_size_multiple=50048"]
    assert main(["sweep", str(EXAMPLE), "--dry-run", "--nodes", "1", "--gpus-per-node", "8", *more]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 4 * 3 * 4
    sizes = {row[0]: int(row[1].replace(",", "")) for row in rows}
    compute: dict[str, list[float]] = {}
    for name, _, steps, tokens, flops, _ in rows:
        size, budget, mixer = name.split("-")
        assert float(flops) == pytest.approx(float(budget.removeprefix("training_flops")), rel=1e-3)
        assert sizes[name] == pytest.approx(sizes[f"{size}-{budget}-full"], rel=0.01)
        assert int(tokens.replace(",", "")) == int(steps) * 64 * 2048
        compute.setdefault(f"{budget}-{mixer}", []).append(6 * sizes[name] * int(steps))
    # `selectron fit` groups runs as equal compute if their 6 * parameters * tokens differ by a factor below 1.12.
    assert all(max(found) / min(found) < 1.12 for found in compute.values())


def test_matching_has_defaults(base: Path) -> None:
    text = f"config: base.yaml\naxes:{MIXERS}match_parameters: {{axis: mixer, to: full}}"
    expected = MatchParameters(axis="mixer", to="full", multiple_of=8, within=0.01)
    assert read_sweep(written(base, text)).match == expected
