"""Requirements of CI: tests that need them are not skipped."""

from __future__ import annotations

import pytest
from required import VARIABLE, unless_required


def test_what_is_not_required_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert unless_required("slurm", "no sbatch") == "no sbatch"
    monkeypatch.setenv(VARIABLE, "browser")
    assert unless_required("slurm", "no sbatch") == "no sbatch"


def test_what_is_required_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "slurm,browser")
    assert unless_required("slurm", "") == ""
    with pytest.raises(RuntimeError, match="no sbatch; SELECTRON_REQUIRED asks for slurm"):
        unless_required("slurm", "no sbatch")
