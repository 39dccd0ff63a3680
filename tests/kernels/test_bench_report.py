"""Report of the benchmark of kernels, its options, and the command without a GPU."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.bench import bench_report, options, timing
from kernels.bench.cases import KernelPlan, OptionError, Shape
from kernels.bench.checks import Verdict
from kernels.bench.report import KernelReport, KernelRow, Measured
from kernels.bench.timing import Ceilings, Times
from megatron_ext import cli

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(batch=50, length=2048, heads=16, groups=16, head_dim=128)
FEW_KEYS = Shape(batch=1, length=102_400, heads=32, groups=2, head_dim=64)


def row(name, median=None, pass_name="forward", shape=SHAPE, **fields):
    if median is not None:
        times = Times(median, 0.9 * median, 1.25 * median)
        fields["measured"] = Measured(times=times, operations=8e11, bytes=2e9, extra_memory=0.0345)
    return KernelRow(name=name, shape=shape, pass_name=pass_name, **fields)


@pytest.fixture
def sample_report():
    verdict = Verdict(errors={"output": 0.002, "dq": float("nan")}, choices=1000, different=3, largest_share=0.0123)
    plan = KernelPlan(
        shapes=(SHAPE, FEW_KEYS), ops=("top1_chunk:exact",), peers=("sdpa_cudnn", "nsa"), passes=("forward",),
        choices="zipf", repeat=7, chunk_size=128, top_k=1, seed=11, output=Path("somewhere"),
    )  # fmt: skip
    rows = [
        row("sdpa_cudnn", 2.0),
        row("top1_chunk:exact", 0.5, verdict=verdict),
        row("nsa", not_run="fla is not installed"),
        row("top1_chunk:exact", 5.0, pass_name="forward_backward", verdict=verdict),
        row("top1_chunk:exact", shape=FEW_KEYS, failed="output off by 3.2e-01, limit 1e-02", verdict=verdict),
    ]
    return KernelReport(plan=plan, machine={"gpu": "A GPU", "fla": None}, ceilings=Ceilings(8e14, 4e12), rows=rows)


def table(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table(sample_report):
    text = sample_report.markdown()
    header, _, *rows = table(text)
    assert header[0] == "heads x dim"
    assert {len(line) for line in rows} == {len(header)}
    same, chunk, empty = ["16x128", "2048x50"], "top1_chunk:exact", [""] * 7
    failure = "failed: output off by 3.2e-01, limit 1e-02"
    # 8e11 operations take 1 ms at peak FLOPS, 2e9 bytes take 0.5 ms.
    assert rows == [
        [*same, "sdpa_cudnn", "forward", "2.00", "1.80 to 2.50", "400", "1000", "1.00", "50 %", "3.5 %", "1.00x"],
        [*same, chunk, "forward", "0.500", "0.450 to 0.625", "1600", "4000", "1.00", "200 %", "3.5 %", "4.00x"],
        [*same, "nsa", "forward", "not run: fla is not installed", *empty],
        [*same, chunk, "forward + backward", "5.00", "4.50 to 6.25", "160", "400", "1.00", "20 %", "3.5 %", ""],
        ["32x64 (2 kv)", "102400x1", chunk, "forward", failure, *empty],
    ]  # fmt: skip
    assert "Machine: gpu A GPU.\n" in text
    assert "800 TFLOP/s, copy 4.00 TB/s" in text
    assert "choices zipf, chunk 128, top_k 1, seed 11. Medians of 7 runs" in text
    assert (
        text.count("3 of 1000 choices differ from those by float64; a head's most popular chunk has at most 1.2 %") == 2
    )
    assert sample_report.failures == [sample_report.rows[-1]]


def test_files(sample_report, tmp_path):
    sample_report.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.json", "kernels.md"]
    assert (tmp_path / "kernels.md").read_text() == sample_report.markdown()
    found = json.loads((tmp_path / "kernels.json").read_text(), parse_constant=pytest.fail)
    assert found["ceilings"] == {"tflops": 800.0, "gb_per_s": 4000.0}
    assert found["settings"]["seed"] == 11
    assert found["machine"] == {"gpu": "A GPU", "fla": None}
    cudnn, ours, nsa, both, failed = found["rows"]
    assert {key: cudnn[key] for key in ("op", "length", "batch", "heads", "groups", "head_dim", "pass")} == {
        "op": "sdpa_cudnn", "length": 2048, "batch": 50, "heads": 16, "groups": 16, "head_dim": 128, "pass": "forward",
    }  # fmt: skip
    numbers = {
        "ms": 0.5, "ms_20": 0.45, "ms_80": 0.625, "operations": 8e11, "bytes": 2e9, "tflops": 1600, "gb_per_s": 4000,
        "floor_ms": 1.0, "of_floor": 2.0, "extra_memory_percent": 3.45, "speed_over_sdpa_cudnn": 4.0,
    }  # fmt: skip
    assert {key: ours[key] for key in numbers} == pytest.approx(numbers)
    assert ours["check"]["different"] == 3
    assert ours["check"]["errors"] == {"output": 0.002, "dq": "nan"}
    assert both["speed_over_sdpa_cudnn"] is None
    assert nsa["not_run"] == "fla is not installed"
    assert failed["failed"] == "output off by 3.2e-01, limit 1e-02"
    assert "ms" not in failed


def test_failed_write_keeps_the_old_file(sample_report, tmp_path, monkeypatch):
    sample_report.write(tmp_path)
    before = (tmp_path / "kernels.json").read_text()
    sample_report.rows.pop()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        sample_report.write(tmp_path)
    assert (tmp_path / "kernels.json").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.json", "kernels.md"]


def parse(*arguments):
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.make_plan(parser.parse_args(list(arguments)))


def test_defaults():
    plan = parse()
    assert [(s.heads_name, s.length_name) for s in plan.shapes] == [
        (heads, length) for heads in ("16x128", "32x64") for length in ("2048x50", "8192x12", "102400x1")
    ]
    assert plan.ops == ("top1_chunk:approx", "top1_chunk:exact", "top1_element:straight_through")
    assert plan.peers == ("sdpa_cudnn", "sdpa_flash", "flex_window", "nsa")
    assert (plan.passes, plan.choices) == (("forward", "forward_backward"), "even")
    assert (plan.chunk_size, plan.top_k) == (128, 1)
    assert parse().seed != parse().seed


def test_options():
    plan = parse(
        "--lengths", " 64x2, 100x1", "--heads", "4x8", "--groups", "2", "--ops", "top1_element,top1_element,top1_chunk",
        "--peers", "", "--passes", "forward_backward,forward", "--seed", "3", "--output", "here",
    )  # fmt: skip
    assert plan.shapes == (
        Shape(batch=2, length=64, heads=4, groups=2, head_dim=8),
        Shape(batch=1, length=100, heads=4, groups=2, head_dim=8),
    )
    assert plan.shapes[0].heads_name == "4x8 (2 kv)"
    assert plan.ops == ("top1_element:straight_through", "top1_chunk:exact")
    assert (plan.peers, plan.passes, plan.seed) == ((), ("forward", "forward_backward"), 3)
    assert plan.output == Path("here")


ERRORS = [
    (["--lengths", "2048"], "--lengths: '2048' is not a pair of positive integers; write LENGTHxBATCH, as 2048x50"),
    (["--lengths", "2048x0"], "--lengths: '2048x0' is not a pair of positive integers; write LENGTHxBATCH, as 2048x50"),
    (["--lengths", ","], "--lengths: is empty; write LENGTHxBATCH, as 2048x50"),
    (["--heads", "16x128x2"], "--heads: '16x128x2' is not a pair of positive integers; write HEADSxDIM, as 16x128"),
    (["--heads", "16x512"], "--heads: head dim 512 is too large; give at most 256"),
    (["--groups", "3"], "--groups: 3 does not divide 16 heads; give a divisor"),
    (["--groups", "0"], "--groups: 0 is less than 1; give 1 or more"),
    (["--ops", "top1"], "--ops: 'top1' is not known; choose from top1_chunk:approx, "),
    (["--ops", "", "--peers", ""], "--ops: is empty, and so is --peers; name at least one op or peer"),
    (["--peers", "flash"], "--peers: 'flash' is not known; choose from sdpa_cudnn, sdpa_flash, flex_window, nsa"),
    (["--passes", "backward"], "--passes: 'backward' is not known; choose from forward, forward_backward"),
    (["--passes", ""], "--passes: is empty; give one of forward, forward_backward, or both"),
    (["--repeat", "0"], "--repeat: 0 is less than 1; give 1 or more"),
    (["--chunk-size", "100"], "--chunk-size: 100 is not supported; give one of 32, 64, 128, 256, 512"),
    (["--top-k", "17"], "--top-k: 17 is too large; give at most 16"),
    (["--top-k", "0"], "--top-k: 0 is less than 1; give 1 or more"),
    (["--seed", "-1"], "--seed: -1 is not in 0 .. 4294967295; give a number in that range"),
    (["--repeat", "many"], "argument --repeat: invalid int value: 'many'; see `selectron bench kernels --help`"),
    (["--choices", "odd"], "argument --choices: invalid choice: 'odd' (choose from"),
    ([], "device: torch sees no GPU; run on a machine with a GPU (check with `selectron doctor`)"),
]


@pytest.mark.parametrize(("arguments", "line"), ERRORS, ids=[" ".join(m[0]) for m in ERRORS])
def test_errors_are_one_line(arguments, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        code = cli.main(["bench", "kernels", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    shown = capsys.readouterr()
    (message,) = shown.err.splitlines()
    assert message.startswith(f"selectron: error: {line}")
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cpu", "cuda:2", "cuda:x", "gpu"])
def test_devices_that_do_not_exist(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match=f"device: '{name}' does not exist; give cuda or cuda:0 to cuda:1"):
        timing.find_device(name)


class FakeMeter:
    def __init__(self, device, repeat):
        self.repeat = repeat

    def ceilings(self):
        return Ceilings(8e14, 4e12)

    def time(self, run):
        run()
        return Times(1.0, 1.0, 1.0)

    def new_bytes(self, run):
        return 0


def test_command(monkeypatch, tmp_path, capsys):
    """Everything except the device and the timer is real."""
    monkeypatch.setattr(timing, "find_device", torch.device)
    monkeypatch.setattr(timing, "CudaMeter", FakeMeter)
    arguments = ["--device", "cpu", "--lengths", "70x1", "--heads", "2x8", "--peers", "nsa", "--chunk-size", "32"]
    assert cli.main(["bench", "kernels", *arguments, "--output", str(tmp_path / "a" / "b")]) == 0
    shown = capsys.readouterr()
    assert len(table(shown.out)) == 2 + 4 * 2
    assert len(shown.err.splitlines()) == 4 * 2
    assert len(json.loads((tmp_path / "a" / "b" / "kernels.json").read_text())["rows"]) == 4 * 2
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", "kernels", *arguments, "--output", str(tmp_path / "file")]) == 2
    assert "selectron: error: --output: " in capsys.readouterr().err


def test_wrong_results_exit_with_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timing, "find_device", torch.device)
    monkeypatch.setattr(timing, "CudaMeter", FakeMeter)
    monkeypatch.setattr("kernels.bench.ours.top1_chunk_attention", lambda q, k, v, **_: 1 / 0)
    arguments = ["--device", "cpu", "--lengths", "70x1", "--heads", "2x8", "--peers", "", "--ops", "top1_chunk"]
    assert cli.main(["bench", "kernels", *arguments, "--output", str(tmp_path)]) == 1
    assert "failed: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_standalone_tool():
    done = subprocess.run(
        [sys.executable, "tools/bench_kernels.py", "--heads", "16"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "selectron: error: --heads: '16' is not a pair of positive integers; write HEADSxDIM, as 16x128\n"
    )


def test_machine_description():
    found = bench_report.describe_machine(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["gpu"] is None
    assert found["date"].endswith("+00:00")
