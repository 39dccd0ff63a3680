"""Claims of the study (arXiv 2505.18522) and what a comparison at matched loss says about each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ext.analysis.architecture import BASELINE, Architecture, mixer_label, mixer_names, recipe
from megatron_ext.analysis.matched import RESOLUTION, Comparison, Measurement
from megatron_ext.mixers.core.settings import default_settings

Answer = Literal["supported", "contradicted", "not resolved"]

SELECTING = {"attention", "top1_element", "top1_chunk", "moba", "nsa"}
"""Mixers that compare a query with keys of the whole sequence. All other mixers carry a state."""


@dataclass(frozen=True)
class Claim:
    """Claim about the out-of-domain loss of some architectures, compared with attention at equal training loss.

    Attributes:
        words: the claim, as a sentence without the full stop.
        expected: whether the loss is said to be `higher`, `lower` or the `same` within `RESOLUTION`.
        applies: function that tells from the names of an architecture's mixers and its settings by dotted field whether
            the claim is about it.
    """

    words: str
    expected: Literal["higher", "lower", "same"]
    applies: Callable[[Sequence[str], Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Finding:
    """Answer to a claim for one architecture, with its results out of domain."""

    claim: Claim
    answer: Answer
    measured: Measurement


def _attention_with(field: str, differs: Callable[[Any], bool]) -> Callable[[Sequence[str], Mapping[str, Any]], bool]:
    """Return a function that finds models of attention alone of which only the setting `field` is not the default."""
    return lambda mixers, fields: (
        list(mixers) == ["attention"]
        and differs(fields.get(f"mixers.attention.{field}"))
        and _changed("attention", fields) == {field}
    )


def _chunk_with(score: Callable[[Any], bool]) -> Callable[[Sequence[str], Mapping[str, Any]], bool]:
    """Return a function that finds models of Top-1 Chunk alone by their score; chunks may have any size."""
    return lambda mixers, fields: (
        list(mixers) == ["top1_chunk"]
        and score(fields.get("mixers.top1_chunk.score"))
        and _changed("top1_chunk", fields) <= {"score", "chunk_size"}
    )


def _changed(mixer: str, fields: Mapping[str, Any]) -> set[str]:
    """Return the settings of a mixer that are not the defaults."""
    return {name for name, value in default_settings(mixer).items() if fields.get(f"mixers.{mixer}.{name}") != value}


CLAIMS = (
    Claim(
        "A mixer with a state (Mamba, RWKV, DeltaNet, ...) has a higher loss out of domain than attention",
        "higher",
        lambda mixers, _: not SELECTING & set(mixers),
    ),
    Claim(
        "Top-1 Element, one key selected from the whole sequence, keeps the loss of attention out of domain",
        "same",
        lambda mixers, _: list(mixers) == ["top1_element"],
    ),
    Claim(
        "Top-1 Chunk with exact scores keeps the loss of attention out of domain",
        "same",
        _chunk_with(lambda score: score != "approx"),
    ),
    Claim(
        "Top-1 Chunk with approximate scores has a higher loss out of domain than attention",
        "higher",
        _chunk_with(lambda score: score == "approx"),
    ),
    Claim(
        "Attention in a sliding window has a higher loss out of domain than full attention",
        "higher",
        _attention_with("window", lambda value: value is not None),
    ),
    Claim(
        "Attention to random keys has a higher loss out of domain than attention to keys of the text",
        "higher",
        _attention_with("random_keys", bool),
    ),
    Claim(
        "Attention with a lower softmax temperature has a lower loss out of domain",
        "lower",
        _attention_with("temperature", lambda value: value is not None and value < 1),
    ),
)
"""Claims whose architectures can be told from a run's configuration. The statements about parts of Mamba are missing:
they are about convergence, not about loss at equal training loss."""


def findings(comparison: Comparison) -> list[Finding]:
    """Return the answers to the claims that are about a compared architecture, in the order of the claims.

    The answers use the intervals that hold for all gaps at once, if there are several.
    """
    by_label = {architecture.label: architecture for architecture in comparison.architectures}
    found = []
    for claim in CLAIMS:
        for measured in comparison.compared("test"):
            if _is_about(claim, by_label[measured.architecture], by_label[measured.baseline]):
                low, high = comparison.verdict_interval(measured)
                found.append(Finding(claim, answer(claim.expected, low, high), measured))
    return found


def answer(expected: Literal["higher", "lower", "same"], low: float, high: float) -> Answer:
    """Decide about a claim from the interval of the gap.

    A difference is `contradicted` if the interval excludes a difference of at least `RESOLUTION` on its side of zero,
    and otherwise `supported` if the interval lies on that side. Equality is `supported` if the interval lies within
    `RESOLUTION` of zero, and `contradicted` if the interval lies outside.
    """
    if math.isnan(low):
        return "not resolved"
    if expected == "lower":
        low, high = -high, -low
    if expected == "same":
        if low >= -RESOLUTION and high <= RESOLUTION:
            return "supported"
        return "contradicted" if low > RESOLUTION or high < -RESOLUTION else "not resolved"
    if high < RESOLUTION:
        return "contradicted"
    return "supported" if low > 0 else "not resolved"


def _is_about(claim: Claim, architecture: Architecture, baseline: Architecture) -> bool:
    """Return True if a claim is about an architecture. All claims compare with attention of default settings."""
    run = architecture.runs[0]
    return mixer_label(baseline.runs[0]) == BASELINE and claim.applies(mixer_names(run.pattern), recipe(run))
