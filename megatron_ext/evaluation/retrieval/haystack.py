"""Hay: the text that needles are hidden in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data_prep.documents import Problems
from megatron_ext.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentences of passkey (Mohtashami & Jaggi 2023, arXiv 2305.16300) and of RULER's noise."""

CHARACTERS = 4_000_000
"""Read at most: several times a context of 128k tokens."""

LONGEST_SENTENCE = 60
"""Words: what has no full stop, a table for example, is cut after as many."""

WHERE = "retrieval.haystack"
MEND = "repair it or name another"


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
    """The haystack of a corpus in sentences, or the noise. What `selectron prepare` reads is a corpus, tokens apart.

    White space is squeezed to single blanks. Sentences end with a full stop, question or exclamation mark before a
    blank; RULER takes nltk's model of sentences, which has to be downloaded.

    Raises:
        UserError: nothing is there, it cannot be read, or it holds no text.
    """
    if path is None:
        return NOISE_LINES
    sentences: list[str] = []
    characters = 0
    for text in _texts(path):
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


def _texts(source: str) -> Iterator[str]:
    # Here, as every rank that trains imports this module, and few read a text: the formats bring pyarrow.
    from data_prep.reading.corpus import open_files
    from data_prep.reading.fields import Fields

    try:
        corpus = open_files(source, Fields(default="text"))
    except UserError as error:
        holds_tokens = error.where == "--source-tokenizer"
        problem = f"{source} holds tokens, no text" if holds_tokens else error.problem
        raise UserError(WHERE, problem, "name a file or folder with text in it") from error
    # It is a text that the user chose: what is malformed is not passed over.
    try:
        for document in corpus.documents(Problems("stop")):
            yield document.text
    except UserError as error:
        # Not the error's own mend: it names options of `selectron prepare`.
        raise UserError(WHERE, f"{error.where}: {error.problem}", MEND) from None
    except OSError as error:
        raise UserError(WHERE, f"{source} cannot be read ({error})", MEND) from error
