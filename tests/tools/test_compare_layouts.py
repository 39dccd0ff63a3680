"""Table of losses by layout: compared pairs, and cases of several machines in one table."""

import json
import sys
from pathlib import Path

import compare_layouts
from compare_layouts import LAYOUTS, Case

from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.mixers.core.registry import load_all

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def write(path, cases):
    fields = ("pattern", "precision", "device", "backend", "layout", "losses")
    path.write_text(json.dumps({"torch": "2", "cases": [dict(zip(fields, case, strict=True)) for case in cases]}))
    return str(path)


def test_table_of_differences(tmp_path, monkeypatch, capsys):
    gpu = write(
        tmp_path / "gpu.json",
        [
            ("a*2", "bf16", "cuda", "local", "1", [3.0, 2.0]),
            ("a*2", "bf16", "cuda", "local", "TP2+SP", [3.0, 2.25]),
            ("a*2", "bf16", "cuda", "transformer_engine", "1", []),
            ("a*2", "bf16", "cuda", "transformer_engine", "PP2", [3.0, 2.0]),
        ],
    )
    cpu = write(tmp_path / "cpu.json", [("a*2", "bf16", "cpu", "local", "1", [3.5, 2.0])])
    arguments = ["config.yaml", "--output", str(tmp_path / "out"), "--devices", "", "--others", f"{gpu},{cpu}"]
    monkeypatch.setattr(sys, "argv", ["compare_layouts.py", *arguments])
    assert compare_layouts.main() == 1, "a case has no losses"
    rows = [[cell.strip() for cell in line.split("|")[3:-1]] for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert rows == [
        ["cpu", "local", "1", "3.500000", "2.000000", "", ""],
        ["cuda", "local", "1", "3.000000", "2.000000", "5.0e-01", ""],
        ["cuda", "local", "TP2+SP", "3.000000", "2.250000", "5.0e-01", "2.5e-01"],
        ["cuda", "transformer_engine", "1", "failed", "", "", ""],
        ["cuda", "transformer_engine", "PP2", "3.000000", "2.000000", "5.0e-01", ""],
    ]
    written = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert [case["device"] for case in written["cases"]].count("cuda") == 4


def test_every_layout_may_be_trained():
    cases, mixers = [Case("attention*4", "fp32", "cuda", "local", name) for name in LAYOUTS], load_all()
    layouts = [check(load_config(QUICKSTART, case.overrides(), mixers), case.processes, mixers) for case in cases]
    assert [layout.world_size for layout in layouts] == [1] + [2] * (len(LAYOUTS) - 1)
