"""Input texts that all contestants read, as compressed record files or as one plain file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson
import zstandard

from data_prep.documents import Problems
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from data_prep.reading.inputs import local_file
from data_prep.reading.lines import read_lines

DOMAIN, TEST_DOMAIN = "Text", "Test"
TEST_EVERY = 20
"""One in this many documents is test text, starting with the first document, for decontamination to search for."""

LETTERS = "etaoinshrdlucmfwypvbgk"


@dataclass(frozen=True)
class Input:
    """Input texts on disk.

    Attributes:
        folder: folder with files `*.jsonl.zst`, which together contain all texts.
        lines: plain file with all texts.
        documents: number of documents.
        bytes: size of the text in UTF-8 bytes.
    """

    folder: Path
    lines: Path
    documents: int
    bytes: int


def write_input(root: Path, texts: Iterator[str], files: int) -> Input:
    """Distribute texts over compressed files, and write all to one plain file."""
    folder, lines = root / "records", root / "all.jsonl"
    folder.mkdir(parents=True)
    documents = size = 0
    with ExitStack() as stack:
        plain = stack.enter_context(lines.open("wb"))
        streams = [stack.enter_context(zstandard.open(folder / f"{n:03d}.jsonl.zst", "wb")) for n in range(files)]
        for documents, text in enumerate(texts, start=1):
            # A unique id, so that equal texts do not count as one document.
            domain = TEST_DOMAIN if documents % TEST_EVERY == 1 else DOMAIN
            line = orjson.dumps({"id": str(documents), "text": text, "domain": domain}) + b"\n"
            plain.write(line)
            streams[documents % files].write(line)
            size += len(text.encode())
    return Input(folder, lines, documents, size)


def input_texts(source: Path) -> Iterator[str]:
    """Yield every text of a file or folder."""
    return (document.text for document in open_files(source, Fields(default=DOMAIN)).documents(Problems("stop")))


def random_texts(size: int, seed: int = 0) -> Iterator[str]:
    """Yield documents of 100 to 2000 made-up words with Zipf frequencies, at least `size` characters in total."""
    generator = random.Random(seed)
    words = ["".join(generator.choices(LETTERS, k=generator.randint(2, 10))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    while size > 0:
        text = " ".join(generator.choices(words, weights, k=generator.randint(100, 2000)))
        size -= len(text)
        yield text


def read_texts(paths: list[Path]) -> list[str]:
    """Read all texts of compressed files into memory."""
    return [orjson.loads(line)["text"] for path in paths for line in read_lines(local_file(path))]
