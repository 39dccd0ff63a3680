"""Haystacks: texts in which needles are hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data_prep.documents import Problems
from megatron_ext.utils.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Noise sentences of passkey retrieval (Mohtashami & Jaggi 2023, arXiv 2305.16300) and of RULER."""

MAX_CHARACTERS = 4_000_000
"""Maximum number of characters to read, several times a context of 128k tokens."""

MAX_SENTENCE_WORDS = 60
"""Maximum number of words of a sentence. Text without full stops, such as a table, is cut after as many."""

OPTION = "retrieval.haystack"
HINT = "repair it or choose another"


@dataclass(frozen=True)
class Haystack:
    """Haystack as an ordered list of segments, which are lines of noise or sentences.

    Attributes:
        name: `noise`, or the path of the text.
        segments: lines of noise or sentences, at least one.
        separator: text between segments and needles.
    """

    name: str
    segments: Sequence[str] = field(repr=False)
    separator: str

    def cut(self, start: int, count: int) -> list[str]:
        """Return `count` segments beginning at index `start`, with wrap-around."""
        return [self.segments[index % len(self.segments)] for index in range(start, start + count)]


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
    for text in _read_texts(path):
        sentences += _split_sentences(text)
        characters += len(text)
        if characters >= MAX_CHARACTERS:
            break
    if not sentences:
        raise UserError(OPTION, f"{path} contains no text", "give a file or folder that contains text")
    return Haystack(path, sentences, " ")


def insert(hay: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Insert needles into hay, each before the segment at its depth. Depth 0 is before all segments, 1 after all."""
    segments = list(hay)
    for depth, needle in sorted(needles, key=lambda pair: pair[0], reverse=True):
        segments.insert(int(len(hay) * depth), needle)
    return segments


def _split_sentences(text: str) -> list[str]:
    sentences = []
    for sentence in re.split(r"(?<=[.!?])\s+", text.strip()):
        words = sentence.split()
        sentences += [
            " ".join(words[first : first + MAX_SENTENCE_WORDS]) for first in range(0, len(words), MAX_SENTENCE_WORDS)
        ]
    return sentences


def _read_texts(source: str) -> Iterator[str]:
    # Imported here: every training rank imports this module, but few read a text, and the readers import pyarrow.
    from data_prep.reading.corpus import open_files
    from data_prep.reading.fields import Fields

    try:
        corpus = open_files(source, Fields(default="text"))
    except UserError as error:
        is_token_file = error.where == "--source-tokenizer"
        problem = f"{source} contains tokens, not text" if is_token_file else error.problem
        raise UserError(OPTION, problem, "give a file or folder that contains text") from error
    # The user chose this text: malformed records are errors, not skipped.
    try:
        for document in corpus.documents(Problems("stop")):
            yield document.text
    except UserError as error:
        # The error's own hint is replaced, because it names options of `selectron prepare`.
        raise UserError(OPTION, f"{error.where}: {error.problem}", HINT) from None
    except OSError as error:
        raise UserError(OPTION, f"{source} cannot be read ({error})", HINT) from error
