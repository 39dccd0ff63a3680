"""README: its example mixer registers and computes what the text states, and its table is current."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import MixInput
from megatron_ext.mixers.core.decode_cache import DecodeCache
from megatron_ext.mixers.core.registry import MIXERS, load_all

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def entry():
    load_all()
    known = set(MIXERS)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    (name,) = set(MIXERS) - known
    return MIXERS.pop(name)


def test_the_readmes_mixer_is_whole(entry):
    assert entry.name == "moving_average"
    assert not entry.module.__abstractmethods__
    assert entry.traits == MixerTraits()


def test_the_readmes_mixer_computes_a_moving_average(entry):
    x = torch.randn(7, 2, 3, 4)
    mixer = SimpleNamespace(mixer_config=entry.config_type(width=3))
    mixed = entry.module.mix(mixer, x, MixInput(0, 3))
    assert mixed.shape == x.shape
    for t in range(7):
        torch.testing.assert_close(mixed[t], x[max(0, t - 2) : t + 1].sum(0) / 3)


def test_the_readmes_mixer_decodes(entry):
    x = torch.randn(7, 2, 3, 4)
    mixer, memory = SimpleNamespace(mixer_config=entry.config_type()), DecodeCache()
    pieces = [entry.module.mix(mixer, piece, MixInput(0, 3, history=memory)) for piece in x.split([3, 1, 2, 1])]
    torch.testing.assert_close(torch.cat(pieces), entry.module.mix(mixer, x, MixInput(0, 3)))


def test_the_readmes_table_of_layouts_is_what_is_compared(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "distributed"))
    import parity_cases

    assert set(parity_cases.COLUMNS) == set(parity_cases.LAYOUTS)
    assert parity_cases.table() in parity_cases.README.read_text(encoding="utf-8"), (
        "run: python tests/distributed/parity_cases.py"
    )
