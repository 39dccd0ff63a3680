"""Coverage of the intervals of losses a token over documents, and of gaps at matched training loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from megatron_ext.analysis.matched import compare
from megatron_ext.analysis.runs import DomainEvaluations, Run
from megatron_ext.ratio import ratio_interval


@dataclass(frozen=True)
class Corpus:
    """Kind of documents.

    Attributes:
        deviation: standard deviation of the logarithm of their lengths, normal about that of 600 tokens.
        tail: index of a Pareto law of their lengths, from 100 tokens to `LONGEST`, instead; 0: none.
        slope: change of a document's mean loss with the logarithm of its length: long ones are easier.
        unlike: standard deviation of documents' mean losses beside that, nats a token.
    """

    deviation: float
    slope: float
    unlike: float
    tail: float = 0.0


LONGEST = 200_000
"""Tokens; longer documents of a Pareto law are cut."""

CORPORA = {
    "web": Corpus(1.2, -0.15, 0.5),
    "one length": Corpus(0.0, 0.0, 0.5),
    "books and notes": Corpus(1.5, -0.2, 0.6),
    "heavy tail": Corpus(0.0, -0.15, 0.5, tail=1.2),
}

TOKEN_NOISE = 2.0
"""Standard deviation of a token's loss within its document, nats."""


def draw(corpus: Corpus, shape: tuple[int, ...], dice: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Summed losses and tokens of documents, of a shape."""
    if corpus.tail:
        tokens = _pareto(corpus.tail, dice.random(size=shape))
    else:
        tokens = np.ceil(600 * np.exp(corpus.deviation * dice.normal(size=shape)))
    means = 3.0 + corpus.slope * np.log(tokens / 600) + corpus.unlike * dice.normal(size=shape)
    return tokens * means + TOKEN_NOISE * np.sqrt(tokens) * dice.normal(size=shape), tokens


def _pareto(tail: float, share: np.ndarray) -> np.ndarray:
    """Lengths that a share of the documents exceeds."""
    return np.ceil(np.minimum(100 * share ** (-1 / tail), LONGEST))


@cache
def truth_of(corpus: Corpus) -> float:
    """The loss a token of endlessly many documents: long ones count by their tokens, which shifts their lengths."""
    if corpus.tail:
        tokens = _pareto(corpus.tail, (np.arange(1_000_000) + 0.5) / 1_000_000)
        return float(3.0 + corpus.slope * (tokens @ np.log(tokens / 600)) / tokens.sum())
    return 3.0 + corpus.slope * corpus.deviation**2


def ratio_coverage(documents: int, experiments: int, corpus: str = "web", seed: int = 0) -> float:
    """How often the interval of a domain's loss holds the truth."""
    kind, dice, hits = CORPORA[corpus], np.random.default_rng([seed, documents]), 0
    for _ in range(experiments):
        nats, tokens = draw(kind, (documents,), dice)
        low, high = ratio_interval(nats, tokens, 0.95) or (np.nan, np.nan)
        hits += low <= truth_of(kind) <= high
    return hits / experiments


def percentile_coverage(documents: int, experiments: int, corpus: str = "web", seed: int = 0) -> float:
    """The same of the percentile bootstrap that gave the intervals once, for comparison."""
    kind, dice, hits = CORPORA[corpus], np.random.default_rng([seed, documents]), 0
    for _ in range(experiments):
        nats, tokens = draw(kind, (documents,), dice)
        counts = dice.multinomial(documents, np.full(documents, 1 / documents), size=500)
        low, high = np.percentile((counts @ nats) / (counts @ tokens), [2.5, 97.5])
        hits += low <= truth_of(kind) <= high
    return hits / experiments


STEPS, EVERY, WINDOW = 100, 20, 20
"""Of synthetic runs, and of their evaluations."""


def synthetic_run(name: str, seed: int, losses: np.ndarray, domains: tuple[DomainEvaluations, ...]) -> Run:
    """A run in memory: `losses` [STEPS], evaluated every `EVERY` steps."""
    steps = np.arange(1, STEPS + 1)
    config = {"model": {"pattern": f"{name}*4"}, "mixers": {}, "training": {"steps": STEPS, "seed": seed}}
    config |= {"data": {"path": "data", "train_domains": ["web"]}, "run": {"name": name}}
    evaluated = np.arange(EVERY, STEPS + 1, EVERY)
    return Run(Path(name), name, config, seed, steps, 4096 * steps, losses, np.ones(STEPS), evaluated, domains)


def gap_coverage(
    documents: tuple[int, ...], batch_noise: float, experiments: int, corpus: str = "web", seed: int = 0
) -> dict[str, float]:
    """How often the interval of the gap between two runs at matched training loss holds the truth.

    Both runs see the same documents, of one domain or several; a gap differs between documents, and the second run
    trains more slowly on batches of its own.

    Args:
        documents: of each domain.
        batch_noise: standard deviation of a step's training loss.
        experiments: how many.
        corpus: kind of documents.
        seed: of all draws.

    Returns:
        Share of the experiments of all domains together and of the first domain.
    """
    kind, hits = CORPORA[corpus], {"all": 0, "first": 0}
    dice = np.random.default_rng([seed, *documents])
    steps = np.arange(1, STEPS + 1)
    for _ in range(experiments):
        corpora = [draw(kind, (number,), dice) for number in documents]
        own = [0.05 + 0.05 * dice.normal(size=number) for number in documents]  # gap of each document
        runs = []
        for number, (name, speed) in enumerate((("attention", 1.0), ("mamba", 0.85))):
            exact = 2.5 + 4 * np.exp(-speed * steps / 80)
            level = np.array([exact[at - WINDOW : at].mean() for at in range(EVERY, STEPS + 1, EVERY)])
            found = []
            for place, ((nats, tokens), gap) in enumerate(zip(corpora, own, strict=True)):
                losses = nats + tokens * (1.3 * level[:, None] + number * gap)
                noise = 0.3 * np.sqrt(tokens) * dice.normal(size=len(tokens))
                found.append(DomainEvaluations("test", f"d{place}", np.arange(len(tokens)), tokens, losses + noise))
            runs.append(synthetic_run(name, number, exact + batch_noise * dice.normal(size=STEPS), tuple(found)))
        result = compare(runs, window=WINDOW)
        for key, domain in (("all", "all"), ("first", "d0")):
            gap = result.select("test", domain)[1].gap
            hits[key] += bool(gap.low[-1] <= 0.05 <= gap.high[-1])
    return {key: count / experiments for key, count in hits.items()}
