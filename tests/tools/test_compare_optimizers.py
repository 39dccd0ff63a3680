"""Table of optimizers: the fastest round of each counts, and its losses are compared with the reference."""

import compare_optimizers


def rows(outcomes, skipped):
    lines = compare_optimizers.table(outcomes, skipped).splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_table_uses_fastest_round():
    outcome = compare_optimizers.Outcome
    found = rows(
        [
            outcome("megatron", [3.0, 2.0, 1.0], [900.0, 20.0, 20.0], 2 * 2**30),
            outcome("zero1", [3.0, 2.5, 1.0], [900.0, 30.0, 32.0], 2**30),
            outcome("zero2", [], [], 0),
            outcome("zero1", [3.0, 2.25, 1.0], [900.0, 22.0, 22.0], 2**30),
        ],
        skipped=1,
    )
    assert found == [
        ["megatron", "20.0", "1.000", "20.0", "2.0", "3.0000", "1.0000", "0.0e+00"],
        ["zero1", "22.0", "1.100", "31.0 22.0", "1.0", "3.0000", "1.0000", "2.5e-01"],
        ["zero2", "failed", "", "", "", "", "", ""],
    ]


def test_no_ratio_without_reference():
    assert rows([compare_optimizers.Outcome("zero1", [3.0, 2.0], [9.0, 5.0], 2**30)], skipped=0)[0][2] == ""
