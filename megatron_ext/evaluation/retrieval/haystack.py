"""Haystacks: texts in which needles are hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data_prep.documents import Problems
from megatron_ext.utils.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Noise sentences of passkey retrieval (Mohtashami & Jaggi 2023, arXiv 2305.16300) and of RULER."""

CHARACTERS = 4_000_000
"""Maximum number of characters to read, several times a context of 128k tokens."""

LONGEST_SENTENCE = 60
"""Maximum number of words of a sentence. Text without full stops, such as a table, is cut after as many."""

WHERE = "retrieval.haystack"
MEND = "repair it or choose another"


@dataclass(frozen=True)
class Haystack:
    """Haystack as an ordered list of pieces.

    Attributes:
        name: `noise`, or the path of the text.
        pieces: lines of noise or sentences, at least one.
        separator: text between pieces and needles.
    """

    name: str
    pieces: Sequence[str] = field(repr=False)
    separator: str

    def cut(self, start: int, count: int) -> list[str]:
        """Return `count` pieces beginning at index `start`, with wrap-around."""
        return [self.pieces[index % len(self.pieces)] for index in range(start, start + count)]


NOISE_LINES = Haystack("noise", (NOISE,), "\n")


def read_haystack(path: str | None) -> Haystack:
    """Read a corpus as a haystack of sentences.

    White space is collapsed to single spaces. A sentence ends with a full stop, question mark or exclamation mark
    before white space. RULER uses nltk's sentence model, which needs a download.

    Args:
        path: corpus in a format of `selectron prepare`, except token files; None: the noise sentences.

    Raises:
        UserError: the corpus does not exist, cannot be read or contains no text.
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
        raise UserError(WHERE, f"{path} contains no text", "give a file or folder that contains text")
    return Haystack(path, sentences, " ")


def insert(hay: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Insert needles into hay, each before the piece at its depth. Depth 0 is before all pieces, 1 after all."""
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
    # Imported here: every training rank imports this module, few read a text, and the formats import pyarrow.
    from data_prep.reading.corpus import open_files
    from data_prep.reading.fields import Fields

    try:
        corpus = open_files(source, Fields(default="text"))
    except UserError as error:
        holds_tokens = error.where == "--source-tokenizer"
        problem = f"{source} contains tokens, not text" if holds_tokens else error.problem
        raise UserError(WHERE, problem, "give a file or folder that contains text") from error
    # The user chose this text: malformed records are errors, not skipped.
    try:
        for document in corpus.documents(Problems("stop")):
            yield document.text
    except UserError as error:
        # Without the error's own hint, which names options of `selectron prepare`.
        raise UserError(WHERE, f"{error.where}: {error.problem}", MEND) from None
    except OSError as error:
        raise UserError(WHERE, f"{source} cannot be read ({error})", MEND) from error
