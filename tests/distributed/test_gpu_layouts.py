"""GPU tests: bf16 curves agree under every layout, with stored curves, and after a fault on fewer GPUs."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gpu_curves
import psutil
import pytest
import torch
from gpu_curves import KILLED_AFTER, LAYOUTS, STEPS
from launching import records, wait_for_step

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "layouts_bf16.json"
APART, ON_AVERAGE = 0.03, 0.005
"""Bounds on the difference of two curves, nats per token: maximum over steps, and mean. Rounding differences grow with
training. `docs/benchmarks/layouts.md` has the measurements."""
FAULTS = [("dp2", "one"), ("dp4", "dp2"), ("tp2_pp2", "cp2")]
"""Pairs of layouts: before a rank is killed, and on fewer GPUs after it."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def needs(gpus: int) -> Any:
    return pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=f"needs {gpus} GPUs")


class Curves:
    """Losses by layout. Each layout is trained at first use."""

    def __init__(self, folder: Path) -> None:
        self.data = gpu_curves.corpus(folder)
        self.config = gpu_curves.configuration(folder, self.data)
        self.of = cache(lambda layout: gpu_curves.train(self.config, layout))


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return Curves(tmp_path_factory.mktemp("curves"))


def assert_alike(found: list[float], expected: list[float]) -> None:
    apart = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    assert max(apart) < APART
    assert sum(apart) / len(apart) < ON_AVERAGE


def test_a_model_learns(curves: Curves) -> None:
    losses = curves.of("one")
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("layout", [pytest.param(name, marks=needs(LAYOUTS[name][0])) for name in LAYOUTS][1:])
def test_a_layout_follows_one_gpu(curves: Curves, layout: str) -> None:
    assert_alike(curves.of(layout), curves.of("one"))


@pytest.mark.parametrize("layout", [pytest.param(name, marks=needs(LAYOUTS[name][0])) for name in LAYOUTS])
def test_the_curve_is_the_kept_one(curves: Curves, layout: str) -> None:
    kept = gpu_curves.kept_layouts(KEPT, gpu_curves.fingerprint(curves.data))
    if not kept:
        pytest.skip("other versions of the tokenizers prepare other tokens")
    if layout not in kept:
        pytest.skip("no curve of this layout was kept")
    assert_alike(curves.of(layout), kept[layout]["losses"])


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=needs(LAYOUTS[pair[0]][0]), id="-".join(pair)) for pair in FAULTS],
)
def test_a_run_goes_on_with_fewer_gpus_after_a_rank_is_killed(curves: Curves, before: str, after: str) -> None:
    runs, name = curves.config.parent / "runs", f"killed_{before}"

    def command(layout: str) -> list[str]:
        processes, told = LAYOUTS[layout]
        run = [*told, f"run.dir={runs}", f"run.name={name}", "--processes", str(processes)]
        return [sys.executable, "-m", "megatron_ext.cli", "train", str(curves.config), *run]

    process = subprocess.Popen(command(before), stderr=subprocess.PIPE, text=True)
    wait_for_step(process, runs / name, KILLED_AFTER)
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if "train" in child.cmdline()]
    ranks[-1].kill()
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0, said
    subprocess.run([*command(after), "--resume"], check=True, timeout=240)
    steps = records(runs / name)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert_alike([step["loss"] for step in steps], curves.of("one"))
