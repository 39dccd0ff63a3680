"""Notes about versions of libraries that were not tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_ext.platform.megatron_versions import SUPPORTED
from megatron_ext.platform.tested_versions import TESTED, Releases, untested_note

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("name", "version", "note"),
    [
        ("python", "3.12.9", None),
        ("python", "3.14.0", "not tested; tested with 3.11.7 and 3.12.3"),
        ("torch", "2.11.0+cu130", None),
        ("torch", "2.13.0+cpu", "tested without a GPU; with one: 2.11.0"),
        ("triton", "3.6.0", "tested with a GPU; without one: 3.5.0"),
        ("torch", "2.13.1", "not tested; tested with 2.10.0, 2.11.0 and 2.13.0"),
        ("transformer-engine", "2.11.0", None),
        ("transformer-engine", "3.0", "not tested; tested with 2.11.0"),
        ("numpy", "9.0", None),
    ],
)
def test_untested_note(monkeypatch: pytest.MonkeyPatch, name: str, version: str, note: str | None) -> None:
    monkeypatch.setitem(TESTED, "python", Releases(cpu=("3.11.7", "3.12.3"), gpu=("3.12.3",)))
    monkeypatch.setitem(TESTED, "torch", Releases(cpu=("2.10.0", "2.11.0", "2.13.0"), gpu=("2.11.0",)))
    monkeypatch.setitem(TESTED, "triton", Releases(cpu=("3.5.0",), gpu=("3.6.0",)))
    monkeypatch.setitem(TESTED, "transformer-engine", Releases(cpu=(), gpu=("2.11.0",)))
    assert untested_note(name, version) == note


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-py312.txt"])
def test_pinned_versions_are_tested(file: str) -> None:
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    pinned = {name: pins[name] for name in TESTED if name in pins}
    assert set(pinned) == set(TESTED) - {"python", "transformer-engine"}
    assert {name: version for name, version in pinned.items() if version not in TESTED[name].cpu} == {}


@pytest.mark.parametrize("name", TESTED)
def test_the_page_of_versions_has_every_tested_one(name: str) -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    (cells,) = [cells for cells in map(_cells, page.splitlines()) if cells[:1] == [name]]
    cpu, gpu = (tuple(re.findall(r"\d+\.\d+\.\d+", cell)) for cell in cells[2:4])
    assert Releases(cpu, gpu) == TESTED[name]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_tested_versions_may_be_installed() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    allowed = {(requirement := Requirement(line)).name: requirement.specifier for line in lines}
    assert allowed["megatron-core"] == SpecifierSet(SUPPORTED)
    allowed["python"] = SpecifierSet(PROJECT["requires-python"])
    refused = [
        (name, of) for name, tested in TESTED.items() for of in tested.cpu + tested.gpu if of not in allowed[name]
    ]
    assert refused == []


def test_classifiers_name_the_tested_pythons() -> None:
    named = [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if "Python :: " in line]
    assert named == [version.rpartition(".")[0] for version in TESTED["python"].cpu]
