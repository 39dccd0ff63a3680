"""Report of the benchmark of layers, its options, and the command without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bench import timing
from kernels.bench.timing import Times
from kernels.common.dispatch import Choice
from megatron_ext import cli
from megatron_ext.bench.layers import options, report
from megatron_ext.bench.layers.cases import SIZES, LayerPlan, LayerShape
from megatron_ext.bench.layers.ours import Agreement
from megatron_ext.bench.layers.report import LayerReport, LayerRow, Measured
from megatron_ext.mixers.core.registry import load_all

SMALL = LayerShape(size_name="110m", size=SIZES["110m"], length=2048, batch=16)
LONG = LayerShape(size_name="1p3b", size=SIZES["1p3b"], length=102_400, batch=1)
FUSED = (("selective_scan", Choice("triton", "fused on CUDA")),)


def measured(median: float) -> Measured:
    return Measured(times=Times(median, 0.9 * median, 1.25 * median), memory=3 * 2**29, parameters=1000)


@pytest.fixture
def canned() -> LayerReport:
    plan = LayerPlan(
        mixers=("mamba", "gla"), shapes=(SMALL, LONG), peers=("fla",), repeat=7, seed=11, output=Path("somewhere")
    )
    near, far = Agreement(0.004, 0.008), Agreement(0.3, float("nan"))
    rows = [
        LayerRow(
            mixer="mamba", shape=SMALL, maker="ours", measured=measured(2.0), choices=FUSED, flops=2e7, agreement=near
        ),
        LayerRow(mixer="mamba", shape=SMALL, maker="fla", measured=measured(5.0)),
        LayerRow(
            mixer="mamba", shape=LONG, maker="ours", measured=measured(50.0), choices=FUSED, flops=4e7, agreement=near
        ),
        LayerRow(mixer="mamba", shape=LONG, maker="fla", not_run="OutOfMemoryError: 3 | 4"),
        LayerRow(mixer="gla", shape=LONG, maker="ours", failed="output off by 3.0e-01", agreement=far),
        LayerRow(mixer="gla", shape=LONG, maker="fla", measured=measured(4.0), note="no sample fits"),
    ]
    return LayerReport(plan=plan, machine={"gpu": "A GPU", "fla": None}, peak_flops=1e15, rows=rows)


def table(text: str) -> list[list[str]]:
    lines = [line.replace("\\|", "/") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table(canned: LayerReport) -> None:
    text = canned.markdown()
    header, _, *rows = table(text)
    assert header == list(report.COLUMNS)
    small, long, empty = ["110m", "2048x16"], ["1p3b", "102400x1"], [""] * 5
    # 32,768 tokens of 2e7 operations each in 2 ms, and 102,400 tokens of 4e7 in 50 ms.
    assert rows == [
        [*small, "mamba", "ours", "triton", "2.00", "1.80 to 2.50", "16384000", "32.8 %", "1.50", "2.50x"],
        [*small, "mamba", "fla", "", "5.00", "4.50 to 6.25", "6553600", "", "1.50", ""],
        [*long, "mamba", "ours", "triton", "50.0", "45.0 to 62.5", "2048000", "8.2 %", "1.50", ""],
        [*long, "mamba", "fla", "", "not run: OutOfMemoryError: 3 / 4", *empty],
        [*long, "gla", "ours", "", "failed: output off by 3.0e-01", *empty],
        [*long, "gla", "fla", "", "4.00", "3.60 to 5.00", "25600000", "", "1.50", ""],
    ]
    assert text.count("* mamba: selective_scan: triton (fused on CUDA)") == 1
    assert text.endswith("* gla, fla: no sample fits\n")
    assert "Machine: gpu A GPU.\n" in text
    assert "peak 1000 TFLOP/s" in text
    assert "Seed 11. Medians of 7 runs" in text
    assert canned.failures == [canned.rows[4]]


def test_no_mfu_without_peak_flops(canned: LayerReport) -> None:
    unknown = LayerReport(plan=canned.plan, machine=canned.machine, peak_flops=None, rows=canned.rows)
    text = unknown.markdown()
    assert "peak unknown" in text
    assert [row[8] for row in table(text)[2:]] == [""] * 6
    assert unknown.to_dict()["rows"][0]["mfu"] is None


def test_the_files(canned: LayerReport, tmp_path: Path) -> None:
    canned.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.json", "layers.md"]
    assert (tmp_path / "layers.md").read_text() == canned.markdown()
    found = json.loads((tmp_path / "layers.json").read_text(), parse_constant=pytest.fail)
    assert found["peak_tflops"] == 1000.0
    assert found["settings"] == {
        "mixers": ["mamba", "gla"], "peers": ["fla"], "repeat": 7, "seed": 11, "output": "somewhere",
        "configurations": None,
        "dtype": "bfloat16",
    }  # fmt: skip
    ours, theirs, _, not_run, failed, noted = found["rows"]
    assert [row.get("note") for row in (ours, noted)] == [None, "no sample fits"]
    numbers = {
        "hidden": 768, "heads": 12, "head_dim": 64, "length": 2048, "batch": 16, "ms": 2.0, "ms_20": 1.8, "ms_80": 2.5,
        "tokens_per_s": 16_384_000, "flops_per_token": 2e7, "mfu": 0.32768, "memory_bytes": 3 * 2**29,
        "parameters": 1000, "fla_time_over_ours": 2.5,
    }  # fmt: skip
    assert {key: ours[key] for key in numbers} == pytest.approx(numbers)
    assert (ours["mixer"], ours["layer"], ours["size"]) == ("mamba", "ours", "110m")
    assert ours["implementations"] == [{"op": "selective_scan", "name": "triton", "reason": "fused on CUDA"}]
    assert ours["check"] == {"output": 0.004, "gradient": 0.008}
    assert (theirs["layer"], theirs["mfu"], theirs["fla_time_over_ours"]) == ("fla", None, None)
    assert (not_run["not_run"], "ms" in not_run) == ("OutOfMemoryError: 3 | 4", False)
    assert (failed["failed"], failed["check"]["gradient"]) == ("output off by 3.0e-01", "nan")


def parse(*arguments: str) -> LayerPlan:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.make_plan(parser.parse_args(list(arguments)))


def test_default_plan() -> None:
    plan = parse()
    assert plan.mixers == tuple(sorted(load_all()))
    assert [(s.size_name, *s.size, s.length, s.tokens) for s in plan.shapes] == [
        ("110m", 768, 12, 64, 2048, 102_400),
        ("1p3b", 2048, 16, 128, 2048, 32_768),
        ("1p3b", 2048, 16, 128, 8192, 32_768),
        ("1p3b", 2048, 16, 128, 32_768, 32_768),
        ("1p3b", 2048, 16, 128, 102_400, 102_400),
    ]
    assert (plan.peers, plan.repeat, plan.output) == (("fla",), 30, Path("bench/layers"))
    assert parse().seed != parse().seed


def test_options_of_layers() -> None:
    plan = parse(
        "--mixers", "rwkv7, gla,rwkv7", "--shapes", "1p3b:64x3, 110m:8x1,1p3b:64x3", "--peers", "", "--repeat", "4",
        "--seed", "9", "--output", "here",
    )  # fmt: skip
    assert plan == LayerPlan(
        mixers=("rwkv7", "gla"),
        shapes=(
            LayerShape(size_name="1p3b", size=SIZES["1p3b"], length=64, batch=3),
            LayerShape(size_name="110m", size=SIZES["110m"], length=8, batch=1),
        ),
        peers=(),
        repeat=4,
        seed=9,
        output=Path("here"),
    )


def test_shape_with_fewer_heads() -> None:
    (shape,) = options.make_shapes("1p3b/2:102400x1")
    assert (shape.size_name, shape.size, shape.length_name) == ("1p3b/2", SIZES["1p3b"]._replace(heads=2), "102400x1")


FORM = "write SIZE[/HEADS]:LENGTHxBATCH, e.g. 110m:2048x16 or 110m/2:2048x16; sizes are 110m, 1p3b"
MISTAKES = [
    (["layers", "--shapes", "110m:2048"], f"--shapes: '110m:2048' is not a valid shape; {FORM}"),
    (["layers", "--shapes", "7b:2048x1"], f"--shapes: '7b:2048x1' is not a valid shape; {FORM}"),
    (["layers", "--shapes", "110m/0:8x1"], f"--shapes: '110m/0:8x1' is not a valid shape; {FORM}"),
    (["layers", "--shapes", "110m:0x1"], f"--shapes: '110m:0x1' is not a valid shape; {FORM}"),
    (["layers", "--shapes", ","], f"--shapes: is empty; {FORM}"),
    (["layers", "--mixers", "gla,glas"], "--mixers: 'glas' is not known; choose from attention, based, deltanet, "),
    (["layers", "--mixers", ""], "--mixers: is empty; name some of attention, "),
    (["layers", "--peers", "flash"], "--peers: 'flash' is not known; choose from fla"),
    (["layers", "--repeat", "0"], "--repeat: 0 is less than 1; give 1 or more"),
    (["layers", "--configurations", "0"], "--configurations: 0 is less than 1; give 1 or more"),
    (["layers", "--seed", "4294967296"], "--seed: 4294967296 is not in 0 .. 4294967295; give a number in that range"),
    (["layers", "--lengths", "64x1"], "unrecognized arguments: --lengths 64x1; see `selectron bench --help`"),
    (["layers", "--repeat", "x"], "argument --repeat: invalid int value: 'x'; see `selectron bench layers --help`"),
    (["rows"], "argument SUBJECT: invalid choice: 'rows' (choose from"),
    ([], "the following arguments are required: SUBJECT; see `selectron bench --help`"),
    (["layers"], "device: torch sees no GPU; run on a machine with a GPU (check with `selectron doctor`)"),
]


@pytest.mark.parametrize(("arguments", "line"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    shown = capsys.readouterr()
    (message,) = shown.err.splitlines()
    assert message.startswith(f"selectron: error: {line}")
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="megatron-core puts its tensors on the GPU it sees")
def test_the_command_runs_through(
    shape: LayerShape,
    meter: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everything except the device and the timer is real. fla's kernels do not run on a CPU."""
    monkeypatch.setattr(timing, "find_device", torch.device)
    monkeypatch.setattr(timing, "CudaMeter", lambda *_: meter)
    arguments = ["--device", "cpu", "--mixers", "gla,top1_chunk", "--shapes", "tiny:70x2", "--output"]
    assert cli.main(["bench", "layers", *arguments, str(tmp_path / "a" / "b")]) == 0
    shown = capsys.readouterr()
    assert len(table(shown.out)) == 2 + 3
    assert "tiny 70x2 gla ours: 2.00 ms" in shown.err
    assert "tiny 70x2 gla fla: not run: " in shown.err
    assert len(json.loads((tmp_path / "a" / "b" / "layers.json").read_text())["rows"]) == 3
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", "layers", *arguments, str(tmp_path / "file")]) == 2
    assert "selectron: error: --output: " in capsys.readouterr().err
    monkeypatch.setattr("megatron_ext.mixers.gla.gated_linear_attention", lambda *_, **__: 1 / 0)
    assert cli.main(["bench", "layers", *arguments, str(tmp_path), "--peers", ""]) == 1
    assert "failed: ZeroDivisionError: division by zero" in capsys.readouterr().out
