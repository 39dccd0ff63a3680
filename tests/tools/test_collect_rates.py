"""Rates in the package equal those computed from the stored reports."""

import json
from pathlib import Path

import collect_rates

ROOT = Path(__file__).parents[2]


def test_packaged_rates_equal_reports(capsys):
    collect_rates.main()
    assert json.loads(capsys.readouterr().out) == json.loads((ROOT / "megatron_ext/planning/rates.json").read_text())


def test_rate_by_hand():
    report = json.loads((ROOT / "docs/benchmarks/layers/gpu2.json").read_text())
    (row,) = [r for r in report["rows"] if (r["mixer"], r["hidden"], r["layer"]) == ("attention", 768, "ours")]
    ((rate, heads),) = [
        found
        for found in collect_rates._layer_rates("layers/gpu2.json")
        if (found[0].part, found[0].hidden_size) == ("attention", 768)
    ]
    # 6 operations per weight, and 12 per channel and pair of positions, of which causality keeps half.
    flops = 6 * 4 * 768**2 + 12 * 768 * 2049 / 2
    assert abs(rate.flops / (flops * 50 * 2048 / row["ms"] * 1e3) - 1) < 1e-3
    assert heads == 12 * 50
