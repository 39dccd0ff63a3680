"""Fixtures of the reports' tests, most of whose time goes into drawing pictures.

This file also lets tests in subfolders import `analysis_synthetic`.
"""

from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest
from analysis_synthetic import drawn_by
from browser import Browser, browser
from PIL import Image

from megatron_ext.analysis.scaling import law
from megatron_ext.analysis.style import LIGHT


def pixel() -> bytes:
    file = BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every picture by one pixel, for tests of everything else in a report."""
    drawn_by(monkeypatch, lambda _: lambda *_: pixel())


@pytest.fixture
def painted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each picture once, and reuse it for dark mode and for phones."""
    drawn_by(monkeypatch, lambda draw: lambda *_: draw(LIGHT, False))


def start_near_one_half() -> Iterator[None]:
    """Start fits near the exponents of most laws here, for tests that do not depend on the starting points."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("alpha", "beta"):
            patch.setitem(law.STARTS, name, np.array([0.5]))
        yield


few_starts = pytest.fixture(start_near_one_half)
few_starts_in_module = pytest.fixture(scope="module")(start_near_one_half)


@pytest.fixture(scope="module")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def window(_browser: Browser) -> Browser:
    """The browser of a module's tests, 1280 pixels wide in light colours, with no message or request of the past."""
    _browser.show(1280)
    _browser.complaints()
    _browser.requests()
    return _browser
