"""Table of training steps, compared with the stored reports."""

import json

import training_table


def test_page_has_current_table():
    text = training_table.PAGE.read_text()
    assert training_table.replace_table(text) == text, "run: python tools/training_table.py"


def test_cell_by_hand():
    rows = json.loads((training_table.PAGE.parent / "training/100k_two_gpus_4f0b591.json").read_text())["rows"]
    (row,) = [row for row in rows if row["variant"] == "approx_nccl"]  # the same rows of ed2e6a3 are slower
    speed = 2 * 102400 / row["derived"]["s_per_step"] / 2
    cell = training_table.cells()["Top-1 Chunk approx", "2 H200", "CP2"][102400]
    assert cell.split(", ")[0] == f"{speed:,.0f}"
    assert cell.endswith("98 GiB, none")
