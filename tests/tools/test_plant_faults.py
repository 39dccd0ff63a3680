"""List of planted faults, and the program that plants them."""

from __future__ import annotations

from pathlib import Path

import plant_faults
import pytest
from planted_faults import FAULTS, PlantedFault


def test_faults_match_sources() -> None:
    for fault in FAULTS:
        assert plant_faults.plant_text((plant_faults.ROOT / fault.file).read_text(), fault).count(fault.new) >= 1
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.mark.parametrize(("new", "caught"), [("b - a", True), ("a - b", False)])
def test_fault_is_caught_if_test_fails(tmp_path: Path, new: str, caught: bool) -> None:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text("from sums import add\n\ndef test_add():\n    assert add(3, 0) == 3\n")
    result = plant_faults.plant(tmp_path, PlantedFault("a sum", "sums.py", "a + b", new, "test_sums.py"))
    assert result["caught"] is caught
    assert "a + b" in (tmp_path / "sums.py").read_text()


def test_tests_must_pass_without_fault(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("x = 1\n")
    (tmp_path / "test_sums.py").write_text("def test_never():\n    assert False\n")
    with pytest.raises(RuntimeError, match="without a fault"):
        plant_faults.require_pass(tmp_path, "test_sums.py")
