"""Coverage of confidence intervals: loss per token over documents, and gaps at matched training loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from megatron_ext.analysis.matched import compare
from megatron_ext.analysis.run_files import DomainEvaluations
from megatron_ext.analysis.runs import Run
from megatron_ext.utils.ratio_interval import ratio_interval


@dataclass(frozen=True)
class Corpus:
    """Distribution of document lengths and losses.

    Attributes:
        deviation: standard deviation of the logarithm of the length. Lengths are log-normal with median 600 tokens.
        slope: change of a document's mean loss with the logarithm of its length. Long documents have a lower loss.
        document_deviation: standard deviation of the documents' mean losses beyond that, nats per token.
        tail: if not 0, lengths follow a Pareto law with this index instead, from 100 tokens to `MAX_LENGTH`.
    """

    deviation: float
    slope: float
    document_deviation: float
    tail: float = 0.0


MAX_LENGTH = 200_000
"""Maximum length of a document in a Pareto law, tokens."""

CORPORA = {
    "web": Corpus(1.2, -0.15, 0.5),
    "one length": Corpus(0.0, 0.0, 0.5),
    "books and notes": Corpus(1.5, -0.2, 0.6),
    "heavy tail": Corpus(0.0, -0.15, 0.5, tail=1.2),
}

TOKEN_NOISE = 2.0
"""Standard deviation of a token's loss within its document, nats."""


def draw(corpus: Corpus, shape: tuple[int, ...], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw the summed losses (nats) and the token counts of documents, each of the given shape."""
    if corpus.tail:
        tokens = _pareto(corpus.tail, generator.random(size=shape))
    else:
        tokens = np.ceil(600 * np.exp(corpus.deviation * generator.normal(size=shape)))
    means = 3.0 + corpus.slope * np.log(tokens / 600) + corpus.document_deviation * generator.normal(size=shape)
    return tokens * means + TOKEN_NOISE * np.sqrt(tokens) * generator.normal(size=shape), tokens


def _pareto(tail: float, share: np.ndarray) -> np.ndarray:
    """Return the lengths in tokens that the given shares of the documents exceed."""
    return np.ceil(np.minimum(100 * share ** (-1 / tail), MAX_LENGTH))


@cache
def true_loss(corpus: Corpus) -> float:
    """Return the loss per token in the limit of infinitely many documents, each weighted by its tokens."""
    if corpus.tail:
        tokens = _pareto(corpus.tail, (np.arange(1_000_000) + 0.5) / 1_000_000)
        return float(3.0 + corpus.slope * (tokens @ np.log(tokens / 600)) / tokens.sum())
    return 3.0 + corpus.slope * corpus.deviation**2


def ratio_coverage(documents: int, experiments: int, corpus: str = "web", seed: int = 0) -> float:
    """Return the share of experiments in which the interval of a domain's loss contains the true loss."""
    kind, generator, hits = CORPORA[corpus], np.random.default_rng([seed, documents]), 0
    for _ in range(experiments):
        nats, tokens = draw(kind, (documents,), generator)
        low, high = ratio_interval(nats, tokens, 0.95) or (np.nan, np.nan)
        hits += low <= true_loss(kind) <= high
    return hits / experiments


def percentile_coverage(documents: int, experiments: int, corpus: str = "web", seed: int = 0) -> float:
    """Return the coverage of the percentile bootstrap, for comparison with `ratio_coverage`."""
    kind, generator, hits = CORPORA[corpus], np.random.default_rng([seed, documents]), 0
    for _ in range(experiments):
        nats, tokens = draw(kind, (documents,), generator)
        counts = generator.multinomial(documents, np.full(documents, 1 / documents), size=500)
        low, high = np.percentile((counts @ nats) / (counts @ tokens), [2.5, 97.5])
        hits += low <= true_loss(kind) <= high
    return hits / experiments


STEPS, EVERY, WINDOW = 100, 20, 20
"""Steps of synthetic runs, interval of their evaluations, and window over which training losses are averaged."""


def synthetic_run(name: str, seed: int, losses: np.ndarray, domains: tuple[DomainEvaluations, ...]) -> Run:
    """Build a run in memory with training `losses` [STEPS], evaluated every `EVERY` steps."""
    steps = np.arange(1, STEPS + 1)
    config = {"model": {"pattern": f"{name}*4"}, "mixers": {}, "training": {"steps": STEPS, "seed": seed}}
    config |= {"data": {"path": "data", "train_domains": ["web"]}, "run": {"name": name}}
    evaluated = np.arange(EVERY, STEPS + 1, EVERY)
    return Run(Path(name), name, config, seed, steps, 4096 * steps, losses, np.ones(STEPS), evaluated, domains)


def gap_coverage(
    documents: tuple[int, ...], batch_noise: float, experiments: int, corpus: str = "web", seed: int = 0
) -> dict[str, float]:
    """Return the share of experiments in which the interval of the gap at matched training loss contains the true gap.

    Two runs are evaluated on the same documents, of one domain or several. The gap varies between documents. The
    second run learns more slowly, and the noise of its training losses is independent.

    Args:
        documents: number of documents in each domain.
        batch_noise: standard deviation of a step's training loss, nats.
        experiments: number of experiments.
        corpus: key of `CORPORA`.
        seed: random seed of all draws.

    Returns:
        Coverage for all domains together ("all") and for the first domain ("first").
    """
    kind, hits = CORPORA[corpus], {"all": 0, "first": 0}
    generator = np.random.default_rng([seed, *documents])
    steps = np.arange(1, STEPS + 1)
    for _ in range(experiments):
        corpora = [draw(kind, (number,), generator) for number in documents]
        gaps = [0.05 + 0.05 * generator.normal(size=number) for number in documents]  # gap of each document
        runs = []
        for number, (name, speed) in enumerate((("attention", 1.0), ("mamba", 0.85))):
            exact = 2.5 + 4 * np.exp(-speed * steps / 80)
            level = np.array([exact[step - WINDOW : step].mean() for step in range(EVERY, STEPS + 1, EVERY)])
            evaluations = []
            for index, ((nats, tokens), gap) in enumerate(zip(corpora, gaps, strict=True)):
                losses = nats + tokens * (1.3 * level[:, None] + number * gap)
                noise = 0.3 * np.sqrt(tokens) * generator.normal(size=len(tokens))
                evaluations.append(
                    DomainEvaluations("test", f"d{index}", np.arange(len(tokens)), tokens, losses + noise)
                )
            runs.append(
                synthetic_run(name, number, exact + batch_noise * generator.normal(size=STEPS), tuple(evaluations))
            )
        comparison = compare(runs, window=WINDOW)
        for key, domain in (("all", "all"), ("first", "d0")):
            gap = comparison.select("test", domain)[1].gap
            hits[key] += bool(gap.low[-1] <= 0.05 <= gap.high[-1])
    return {key: count / experiments for key, count in hits.items()}
