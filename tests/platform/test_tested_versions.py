"""Notes about versions of libraries that were not tested."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_ext.platform.megatron_versions import SUPPORTED
from megatron_ext.platform.tested_versions import TESTED, untested_note

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("name", "version", "note"),
    [
        ("torch", "2.13.0+cu130", None),
        ("megatron-core", "0.16.1", None),
        ("megatron-core", "0.18.2", "not tested; tested with 0.16 and 0.19"),
        ("triton", "3.70.1", "not tested; tested with 3.6 and 3.7"),
        ("transformer-engine", "3.0", "not tested; tested with 2.11"),
        ("numpy", "9.0", None),
    ],
)
def test_untested_note(name: str, version: str, note: str | None) -> None:
    assert untested_note(name, version) == note


def test_tested_versions_may_be_installed() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    allowed = {(requirement := Requirement(line)).name: requirement.specifier for line in lines}
    assert allowed["megatron-core"] == SpecifierSet(SUPPORTED)
    for name, series in TESTED.items():
        specifier = SpecifierSet(PROJECT["requires-python"]) if name == "python" else allowed[name]
        for version in series:
            assert any(specifier.contains(f"{version}.{patch}") for patch in range(20)), (name, version)
