"""Results of retrieval tests: every answer, and mean scores with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from megatron_ext.evaluation.retrieval.options import RetrievalOptions

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Record:
    """Sample and the model's answer.

    Attributes:
        task: name of the task.
        length: length in tokens, including those to generate.
        depth: relative position of the answer, from 0 to 1; None: the task has no depth.
        index: index of the sample.
        tokens: number of tokens of the prompt, or of the whole sequence of a task without text.
        score: score from 0 to 1.
        references: texts that an answer must contain. For a task without text: the text of each token to predict.
        generated: text that the model generated; None: a task without text, which is not generated.
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
    """Task that was not tested at a length, and the reason."""

    task: str
    length: int
    reason: str


@dataclass(frozen=True)
class Summary:
    """Mean score of a task at a length.

    Attributes:
        task: name of the task.
        length: length in tokens.
        depth: depth of the samples; None: all depths, or the task has none.
        samples: number of samples.
        score: mean score.
        low: lower end of the 95 % Wilson interval.
        high: upper end of the interval.
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
    """Results of a retrieval test.

    Attributes:
        options: options of the test.
        haystack: name of the haystack: `noise`, or a path.
        max_length: maximum number of tokens of a forward pass of the model.
        records: records in the order of task, length, depth and index.
        skipped: tasks and lengths that were requested but not tested.
    """

    options: RetrievalOptions
    haystack: str
    max_length: int
    records: Sequence[Record]
    skipped: Sequence[Skipped]

    def by_length(self) -> list[Summary]:
        """Return one summary per task and length, over all depths."""
        return _summaries([(record.task, record.length, None) for record in self.records], self.records)

    def by_depth(self) -> list[Summary]:
        """Return one summary per task, length and depth."""
        return _summaries([(record.task, record.length, record.depth) for record in self.records], self.records)


def wilson_interval(mean: float, samples: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a mean of scores from 0 to 1 (Wilson 1927).

    Wilson's interval is meant for proportions. Scores that are only 0 or 1 have the largest variance, so that the
    interval is at most too wide for other scores. Unlike a bootstrap interval it has a width even if all samples have
    the same score.

    Args:
        mean: mean of the scores.
        samples: number of scores.
        confidence: confidence level between 0 and 1.
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
