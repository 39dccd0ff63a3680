"""Coverage of the report's intervals and errors of its verdicts, on synthetic studies whose truth is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.analysis.claims import findings
from megatron_ext.analysis.matched import Comparison, compare
from megatron_ext.analysis.run_files import DomainEvaluations
from megatron_ext.analysis.runs import Run

Gap = Callable[[np.ndarray], np.ndarray]

WINDOW = 20
"""Steps over which training losses are averaged."""


@dataclass(frozen=True)
class Noise:
    """Random parts of a synthetic study, as standard deviations in nats per token.

    Attributes:
        checkpoint: out-of-domain loss of a single evaluation about the run's curve.
        batch: training loss of a single step.
        seed: out-of-domain loss of a run about the mean over seeds.
        shared: share of the variance of the first two that runs of one seed have in common, as they read the same data.
        falling: True if the noise of evaluations falls with the steps, from twice its size to 0.6 times.
    """

    checkpoint: float = 0.05
    batch: float = 0.05
    seed: float = 0.0
    shared: float = 0.3
    falling: bool = False


@dataclass(frozen=True)
class Study:
    """Study of architectures whose true gap to attention is known at every training loss.

    Attributes:
        gap: true gap in nats as a function of the training loss.
        speeds: speed of training of each architecture besides attention, whose speed is 1.
        seeds: number of seeds of each.
        attention_seeds: number of seeds of attention; None: as many as the others.
        evaluations: number of evaluations of a run.
        every: steps between evaluations.
        documents: number of test documents.
        noise: random parts.
    """

    gap: Gap
    speeds: Sequence[float] = (0.85,)
    seeds: int = 1
    attention_seeds: int | None = None
    evaluations: int = 10
    every: int = 27
    documents: int = 80
    noise: Noise = Noise()


NAMES = ("mamba", "gla", "retnet", "rwkv7", "deltanet")
"""Mixers of the architectures besides attention: the claim of a higher loss is about all of them."""


def draw(study: Study, generator: np.random.Generator) -> list[Run]:
    """Draw the runs of a study. The test loss is a curved function of the training loss, plus the gap and noise."""
    steps = np.arange(1, study.evaluations * study.every + 1)
    evaluated, noise = steps[study.every - 1 :: study.every], study.noise
    tokens = np.ceil(600 * np.exp(generator.normal(size=study.documents))).astype(np.int64)
    difficulty = 0.5 * generator.normal(size=study.documents)
    scale = np.sqrt(np.linspace(4.0, 0.4, len(evaluated))) if noise.falling else np.ones(len(evaluated))
    most_seeds = max(study.seeds, study.attention_seeds or 0)
    common = {
        seed: (generator.normal(size=len(steps)), generator.normal(size=len(evaluated))) for seed in range(most_seeds)
    }
    runs = []
    for name, speed in zip(("attention", *NAMES), (1.0, *study.speeds), strict=False):
        own_difficulty = 0.05 * generator.normal(size=study.documents) * (name != "attention")
        exact = 2.5 + 4.0 * np.exp(-speed * (3.0 * steps / len(steps)) ** 0.8)
        level = np.array([exact[step - WINDOW : step].mean() for step in evaluated])
        gap = study.gap(level) if name != "attention" else np.zeros_like(level)
        for seed in range(study.attention_seeds or study.seeds if name == "attention" else study.seeds):
            shared_batches, shared_checkpoints = common[seed]
            batches = _mixed(shared_batches, generator.normal(size=len(steps)), noise.shared)
            checkpoints = _mixed(shared_checkpoints, generator.normal(size=len(evaluated)), noise.shared)
            loss = 1.2 * level + 0.05 * level**2 + gap + noise.checkpoint * scale * checkpoints
            loss = loss + noise.seed * generator.normal()
            nats = tokens * (loss[:, None] + difficulty + own_difficulty)
            domain = DomainEvaluations("test", "new", np.arange(study.documents), tokens, nats)
            config = {"model": {"pattern": f"{name}*4"}, "mixers": {}, "training": {"steps": len(steps), "seed": seed}}
            config |= {"data": {"path": "data", "train_domains": ["web"]}, "run": {"name": f"{name}-{seed}"}}
            path, training = Path(f"{name}-{seed}"), exact + noise.batch * batches
            rates = np.ones(len(steps))
            runs.append(Run(path, path.name, config, seed, steps, 4096 * steps, training, rates, evaluated, (domain,)))
    return runs


def _mixed(shared: np.ndarray, own: np.ndarray, share: float) -> np.ndarray:
    return np.sqrt(share) * shared + np.sqrt(1 - share) * own


def study_coverage(study: Study, experiments: int, seed: int = 0) -> dict[str, float]:
    """Return how often the report is right, and how often it resolves the claim of a higher loss.

    Args:
        study: situation.
        experiments: number of studies.
        seed: random seed of all draws.

    Returns:
        headline: share of gaps at the headline whose interval contains the true gap.
        half way: the same at a matched loss in the middle of the range.
        all at once: share of studies in which the family's intervals contain all true gaps.
        wrong: share of answers (supported or contradicted) that the truth refutes, of all answers.
        resolved: share of answers other than "not resolved".
    """
    generator = np.random.default_rng(seed)
    headline, middle, at_once, wrong, resolved = [], [], [], [], []
    for _ in range(experiments):
        comparison = compare(draw(study, generator), window=WINDOW)
        headline += [_holds(study, comparison, index, None) for index in range(len(study.speeds))]
        middle += [_holds(study, comparison, index, comparison.levels[3]) for index in range(len(study.speeds))]
        at_once.append(all(_family_holds(study, comparison)))
        for finding in findings(comparison):
            at = comparison.headlines[finding.measured.architecture]
            truth = float(study.gap(comparison.matched_losses[at : at + 1])[0])
            resolved.append(finding.answer != "not resolved")
            wrong.append(
                (finding.answer == "supported" and truth <= 0) or (finding.answer == "contradicted" and truth >= 0.004)
            )
    columns = {"headline": headline, "half way": middle, "all at once": at_once, "wrong": wrong, "resolved": resolved}
    return {name: float(np.mean(values)) for name, values in columns.items()}


def _holds(study: Study, comparison: Comparison, index: int, level: int | None) -> bool:
    measured = comparison.compared("test")[index]
    at = comparison.headlines[measured.architecture] if level is None else level
    truth = float(study.gap(comparison.matched_losses[at : at + 1])[0])
    return bool(measured.gap.low[at] <= truth <= measured.gap.high[at])


def _family_holds(study: Study, comparison: Comparison) -> list[bool]:
    held = []
    for measured in comparison.compared("test"):
        at = comparison.headlines[measured.architecture]
        low, high = comparison.verdict_interval(measured)
        held.append(low <= float(study.gap(comparison.matched_losses[at : at + 1])[0]) <= high)
    return held


def constant(nats: float) -> Gap:
    """Return a gap that is the same at every training loss."""
    return lambda x: np.full_like(x, nats)


def closing(x: np.ndarray) -> np.ndarray:
    """Return a gap that closes as the training loss falls: 0.1 nats at 4.5, none at 2.5."""
    return 0.05 * (x - 2.5)


QUIET = Noise(checkpoint=0.003, batch=0.02, seed=0.004)
"""Noise of long runs, whose evaluations scatter less."""

STUDIES = {
    "no gap, one seed, sparse evaluations": Study(constant(0.0)),
    "no gap, one seed, noise that falls": Study(constant(0.0), noise=Noise(falling=True)),
    "no gap, one seed, 40 evaluations": Study(constant(0.0), evaluations=40, every=25),
    "no gap, one seed, attention with two": Study(constant(0.0), attention_seeds=2, noise=Noise(seed=0.02)),
    "no gap, three seeds": Study(constant(0.0), seeds=3, noise=Noise(seed=0.02)),
    "no gap, four architectures, three seeds": Study(
        constant(0.0), speeds=(0.85, 0.95, 1.05, 1.15), seeds=3, noise=Noise(seed=0.02)
    ),
    "gap of 0.02, two seeds, little noise": Study(constant(0.02), seeds=2, documents=400, noise=QUIET),
    "gap of 0.02, three seeds, little noise": Study(constant(0.02), seeds=3, documents=400, noise=QUIET),
    "gap of 0.02, five seeds, little noise": Study(constant(0.02), seeds=5, documents=400, noise=QUIET),
    "gap that closes, one seed": Study(closing, evaluations=20, every=25),
    "gap that closes, three seeds": Study(closing, seeds=3, noise=Noise(seed=0.02)),
    "unequal speeds, one seed, four architectures": Study(constant(0.0), speeds=(0.5, 0.7, 1.2, 1.5)),
}
"""Situations of the table: the first two resemble short pilot runs with one seed and few evaluations."""
