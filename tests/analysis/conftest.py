"""Fixtures of the reports' tests, most of whose time goes into drawing pictures.

This file also lets tests in subfolders import `analysis_synthetic`.
"""

from collections.abc import Iterator
from io import BytesIO

import pytest
from analysis_synthetic import replace_drawing, start_near_one_half
from browser import Browser, browser
from PIL import Image

from megatron_ext.analysis.style import LIGHT


def pixel() -> bytes:
    file = BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every picture by one pixel, for tests of everything else in a report."""
    replace_drawing(monkeypatch, lambda _: lambda *_: pixel())


@pytest.fixture
def painted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each picture once, and reuse it for dark mode and for phones."""
    replace_drawing(monkeypatch, lambda draw: lambda *_: draw(LIGHT, False))


@pytest.fixture
def few_starts() -> Iterator[None]:
    """Use one starting point per fit, for tests that do not depend on the starting points."""
    with start_near_one_half():
        yield


@pytest.fixture(scope="module")
def few_starts_in_module() -> Iterator[None]:
    """Use one starting point per fit, in all tests of a module."""
    with start_near_one_half():
        yield


@pytest.fixture(scope="module")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def window(_browser: Browser) -> Browser:
    """Browser shared by a module's tests: 1280 pixels wide, in light colors, without earlier messages and requests."""
    _browser.show(1280)
    _browser.complaints()
    _browser.requests()
    return _browser
