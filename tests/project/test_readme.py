"""README: its table of layouts is current."""

from pathlib import Path

from built_in import MIXERS

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_table_of_layouts_is_what_is_compared(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "distributed"))
    import parity_cases

    assert set(parity_cases.COLUMNS) == set(parity_cases.LAYOUTS)
    # A mixer may have no row yet; each row that is there holds.
    _, _, text = parity_cases.README.read_text(encoding="utf-8").partition("<!-- parity -->\n\n")
    written = text.partition("\n<!-- end -->")[0].splitlines()
    assert {f"`{name}`" for name in MIXERS} <= {row.split("|")[1].strip() for row in written}
    assert set(written) <= set(parity_cases.table().splitlines()), "run: python tests/distributed/parity_cases.py"
