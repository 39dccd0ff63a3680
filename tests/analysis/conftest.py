"""Being here, this file lets the tests in folders below import `analysis_synthetic`. Pictures take most of a report."""

import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.analysis.style import LIGHT, Picture


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


HEAD = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
PIXEL = b"\x89PNG\r\n\x1a\n" + HEAD + chunk(b"IDAT", zlib.compress(bytes(4))) + chunk(b"IEND", b"")


def drawn_by(patch: pytest.MonkeyPatch, change: Callable[[Any], Callable[..., bytes]]) -> None:
    made = Picture.__post_init__

    def make(picture: Picture) -> None:
        made(picture)
        object.__setattr__(picture, "draw", change(picture.draw))

    patch.setattr(Picture, "__post_init__", make)


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture is a pixel: for tests of what stands beside pictures."""
    drawn_by(monkeypatch, lambda _: lambda *_: PIXEL)


@pytest.fixture
def painted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For dark paper and for phones, too, a picture is the one of its file."""
    drawn_by(monkeypatch, lambda draw: lambda *_: draw(LIGHT, False))
