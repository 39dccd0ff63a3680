"""Hay: the text that needles are hidden in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import orjson
import zstandard

from megatron_ext.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentences of passkey (Mohtashami & Jaggi 2023, arXiv 2305.16300) and of RULER's noise."""

RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TEXTS = (".txt", ".text", ".md", ".rst", ".tex")
CHARACTERS = 4_000_000
"""Read at most: several times a context of 128k tokens."""

LONGEST_SENTENCE = 60
"""Words: what has no full stop, a table for example, is cut after as many."""

WHERE = "retrieval.haystack"


@dataclass(frozen=True)
class Haystack:
    """Pieces of hay in their order.

    Attributes:
        name: noise, or where the text is from.
        pieces: lines of noise or sentences, at least one.
        separator: between pieces and needles.
    """

    name: str
    pieces: Sequence[str] = field(repr=False)
    separator: str

    def cut(self, start: int, count: int) -> list[str]:
        """`count` pieces from `start` on, from the first again after the last."""
        return [self.pieces[index % len(self.pieces)] for index in range(start, start + count)]


NOISE_LINES = Haystack("noise", (NOISE,), "\n")


def read_haystack(path: str | None) -> Haystack:
    """The haystack of a local file or folder in sentences, or the noise.

    White space is squeezed to single blanks. Sentences end with a full stop, question or exclamation mark before a
    blank; RULER takes nltk's model of sentences, which has to be downloaded.

    Raises:
        UserError: nothing is there, it cannot be read, or it holds no text.
    """
    if path is None:
        return NOISE_LINES
    sentences: list[str] = []
    characters = 0
    for text in _texts(Path(path)):
        sentences += _sentences(text)
        characters += len(text)
        if characters >= CHARACTERS:
            break
    if not sentences:
        raise UserError(WHERE, f"{path} holds no text", "name a file or folder with text in it")
    return Haystack(path, sentences, " ")


def insert(hay: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Hay with each needle before the piece at its depth: 0 is before the first, 1 after the last."""
    found = list(hay)
    for depth, needle in sorted(needles, key=lambda one: one[0], reverse=True):
        found.insert(int(len(hay) * depth), needle)
    return found


def _sentences(text: str) -> list[str]:
    found = []
    for sentence in re.split(r"(?<=[.!?])\s+", text.strip()):
        words = sentence.split()
        found += [" ".join(words[at : at + LONGEST_SENTENCE]) for at in range(0, len(words), LONGEST_SENTENCE)]
    return found


def _texts(path: Path) -> Iterator[str]:
    if not path.exists():
        raise UserError(WHERE, f"{path} does not exist", "name a file or folder of text")
    inside = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    files = [one for one in inside if one.name.endswith(RECORDS + TEXTS)]
    if not files:
        raise UserError(WHERE, f"{path} holds none of {', '.join(RECORDS + TEXTS)}", "name a file or folder of those")
    for file in files:
        try:
            yield from _records(file) if file.name.endswith(RECORDS) else [file.read_text(encoding="utf-8")]
        except UnicodeDecodeError as error:
            raise UserError(WHERE, f"{file} is not UTF-8 (byte {error.start})", "repair it or name another") from error
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise UserError(WHERE, f"{file} cannot be read ({error})", "repair it or name another") from error


def _records(file: Path) -> Iterator[str]:
    with fsspec.open(str(file), "rt", encoding="utf-8", compression="infer") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = orjson.loads(line)["text"]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise UserError(WHERE, f"{file}:{number} is no record with a text", "repair it or name another")
            yield text
