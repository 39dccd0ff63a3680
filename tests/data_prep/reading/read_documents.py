"""Reading of a whole corpus into memory."""

from data_prep.documents import Problems
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields


def read(source, on_error="stop", domain=None, **given):
    """Return the documents, the problems, and (bytes reported as read, bytes of the corpus)."""
    problems = Problems(on_error)
    seen: list[int] = []
    corpus = open_files(source, Fields(default=domain), **given)
    documents = list(corpus.documents(problems, seen.append))
    return documents, problems, (sum(seen), corpus.total_bytes)
