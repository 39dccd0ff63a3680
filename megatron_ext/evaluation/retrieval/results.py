"""What was found: every answer, and means of scores with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from megatron_ext.evaluation.retrieval.options import RetrievalOptions

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Record:
    """One sample and what the model made of it.

    Attributes:
        task: its name.
        length: tokens asked for, those to generate included.
        depth: where the answer stands, from 0 to 1; None: the task has no one place.
        index: of the sample.
        tokens: of the prompt, or of the whole sequence of a task without text.
        score: from 0 to 1.
        references: what an answer must hold; of a task without text, the tokens to foretell as text.
        generated: what the model wrote; None: it was asked for probabilities.
    """

    task: str
    length: int
    depth: float | None
    index: int
    tokens: int
    score: float
    references: tuple[str, ...]
    generated: str | None


@dataclass(frozen=True)
class Skipped:
    """A task that was not tested at a length, and why."""

    task: str
    length: int
    reason: str


@dataclass(frozen=True)
class Summary:
    """The mean of a task's scores at a length.

    Attributes:
        task: its name.
        length: tokens.
        depth: the one depth; None: all, or the task has none.
        samples: how many.
        score: their mean.
        low: lower end of Wilson's interval of 95 %.
        high: its upper end.
    """

    task: str
    length: int
    depth: float | None
    samples: int
    score: float
    low: float
    high: float


@dataclass(frozen=True)
class RetrievalResults:
    """All of a test.

    Attributes:
        options: what was asked for.
        haystack: what needles of text were hidden in: noise, or a path.
        max_length: the model's.
        records: by task, length, depth and index.
        skipped: what was asked for and not tested.
    """

    options: RetrievalOptions
    haystack: str
    max_length: int
    records: Sequence[Record]
    skipped: Sequence[Skipped]

    def by_length(self) -> list[Summary]:
        """One of each task and length, over all depths."""
        return _summaries([(record.task, record.length, None) for record in self.records], self.records)

    def by_depth(self) -> list[Summary]:
        """One of each task, length and depth."""
        return _summaries([(record.task, record.length, record.depth) for record in self.records], self.records)


def wilson_interval(mean: float, samples: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a mean of scores from 0 to 1 (Wilson 1927).

    It is the interval of a proportion. Of scores between 0 and 1 none vary more than those that are 0 or 1, so that it
    is, if anything, too wide for them; and unlike a bootstrap it has a width where all samples score alike.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    spread = z * ((mean * (1 - mean) + z * z / (4 * samples)) / samples) ** 0.5
    centre, scale = mean + z * z / (2 * samples), 1 + z * z / samples
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _summaries(keys: Sequence[tuple[str, int, float | None]], records: Sequence[Record]) -> list[Summary]:
    groups: dict[tuple[str, int, float | None], list[float]] = {}
    for key, record in zip(keys, records, strict=True):
        groups.setdefault(key, []).append(record.score)
    return [_summary(*key, scores) for key, scores in groups.items()]


def _summary(task: str, length: int, depth: float | None, scores: Sequence[float]) -> Summary:
    mean = fmean(scores)
    return Summary(task, length, depth, len(scores), mean, *wilson_interval(mean, len(scores)))
