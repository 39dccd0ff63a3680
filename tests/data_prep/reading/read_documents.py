"""Functions that read a whole corpus into memory, or a remote one in a process that a test ends by a signal."""

import tempfile
import time

import fsspec

from data_prep.documents import Problems
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from data_prep.tokenization.vocabularies import open_tokenizer


def read(source, on_error="stop", domain=None, **given):
    """Return the documents, the problems, and (bytes reported as read, bytes of the corpus)."""
    problems = Problems(on_error)
    seen: list[int] = []
    corpus = open_files(source, Fields(default=domain), **given)
    documents = list(corpus.documents(problems, seen.append))
    return documents, problems, (sum(seen), corpus.total_bytes)


def read_remote_pair(connection, folder, tokenizer, copies, pauses):
    """Read the files Law.bin and Law.idx from a URL. Pause on the way, for a signal that ends this process.

    Args:
        connection: receives "paused".
        folder: folder of the files, which are read from a URL in memory.
        tokenizer: file of the tokenizer.
        copies: folder for temporary folders.
        pauses: `copying`: after the first copied file, `reading`: at the first document.
    """

    def pause():
        connection.send("paused")
        time.sleep(600)

    tempfile.tempdir = str(copies)
    memory = fsspec.filesystem("memory")
    for suffix in ("bin", "idx"):
        memory.put_file(f"{folder}/Law.{suffix}", f"/in/Law.{suffix}")
    get_file = type(memory).get_file

    def copied(self, source, target, **given):
        get_file(self, source, target, **given)
        if pauses == "copying":
            pause()

    type(memory).get_file = copied
    for _ in open_files("memory://in", tokenizer=open_tokenizer(str(tokenizer))).documents(Problems("stop")):
        pause()
