"""Fit of a scaling law for each mixer, with uncertainty, and its figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, count

import numpy as np

from megatron_ext.analysis.scaling.isoflop import Budget, PowerLaw, best_sizes, budgets
from megatron_ext.analysis.scaling.law import Fit, check_points, fit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.run_points import RunPoints
from megatron_ext.analysis.scaling.transfer import Difference, Line, adjust_p_values, difference, fit_line
from megatron_ext.analysis.scaling.uncertainty import NO_FREEDOM, BackTest, Uncertainty, back_test, compute_uncertainty
from megatron_ext.analysis.style import Picture

NOT_FALLING = "an exponent is not above 0: loss does not fall with it, so the law predicts nothing for larger models"

MixerPair = tuple[str, str, Difference]
"""Names of two mixers, and the difference of their test losses."""


@dataclass(frozen=True)
class MixerFit:
    """Results of one mixer.

    Attributes:
        fitted: the law.
        uncertainty: uncertainty of the law.
        back_test: back-test on the largest models; None if there are too few smaller models.
        budgets: IsoFLOP parabolas.
        best_size: power law of the optimal size over compute; None if fewer than two parabolas have a minimum.
        test_loss: power law of test loss over training loss; None if there are too few test losses.
        domain_losses: the same for each test domain.
    """

    fitted: Fit
    uncertainty: Uncertainty
    back_test: BackTest | None
    budgets: list[Budget]
    best_size: PowerLaw | None
    test_loss: Line | None
    domain_losses: Mapping[str, Line]

    @property
    def interval_warnings(self) -> list[str]:
        """Reasons why constants have no interval, as sentences without the full stop."""
        no_freedom = [NO_FREEDOM] if self.uncertainty.region is None else []
        return [*map(str, self.uncertainty.unidentifiable), *no_freedom]

    @property
    def warnings(self) -> list[str]:
        """Warnings about the law, as sentences without the full stop."""
        return [*self.interval_warnings, *([] if self.fitted.law.is_decreasing else [NOT_FALLING])]


@dataclass(frozen=True)
class DomainDifference:
    """Difference of two mixers on one test domain.

    Attributes:
        domain: name and split of the domain.
        pair: the mixers and their difference.
        adjusted_p_value: p-value adjusted for the number of all pairs on all domains; see `adjust_p_values`.
    """

    domain: str
    pair: MixerPair
    adjusted_p_value: float


@dataclass(frozen=True)
class Options:
    """Options of the fit.

    Attributes:
        drop_highest: number of points with the highest losses to leave out of each mixer.
    """

    drop_highest: int = 0


@dataclass(frozen=True)
class ScalingFit:
    """Results of all mixers.

    Attributes:
        mixers: results by mixer; the name is empty for points without a mixer.
        differences: differences of each pair of mixers with test losses, in the order of the mixers.
        domain_differences: the same for each test domain.
        runs: runs of the points, and runs that were left out; empty for points of a CSV file.
    """

    mixers: Mapping[str, MixerFit]
    differences: Sequence[MixerPair]
    domain_differences: Sequence[DomainDifference]
    runs: RunPoints

    @cached_property
    def pictures(self) -> list[Picture]:
        """Figures of each mixer's law and parabolas, and of test loss over training loss."""
        return _build_pictures(self.mixers)


def fit_all(points: Mapping[str, Points], where: str, options: Options, runs: RunPoints | None = None) -> ScalingFit:
    """Fit a law for each mixer, and warn on standard error about constants that the points do not determine.

    Args:
        points: points by mixer.
        where: name of the points' source in messages.
        options: options of the fit.
        runs: runs of the points; None: the points are from a CSV file.

    Raises:
        UserError: a law cannot be fitted to the points of a mixer.
    """
    points = {mixer: _drop_highest(own, options.drop_highest) for mixer, own in points.items()}
    for mixer, own in points.items():
        check_points(own, _source(where, mixer))
    mixers = {}
    for mixer, own in points.items():
        print(f"fitting a law to {len(own)} points{f' of {mixer}' if mixer else ''}", file=sys.stderr, flush=True)
        mixers[mixer] = _fit_mixer(own)
    for mixer, result in mixers.items():
        for line in result.interval_warnings:
            print(f"warning: {_source(where, mixer)}: {line}", file=sys.stderr)
    differences, domain_differences = _differences(_test_loss_lines(mixers)), _domain_differences(mixers)
    return ScalingFit(mixers, differences, domain_differences, RunPoints() if runs is None else runs)


def title(mixer: str, heading: str) -> str:
    """Append the mixer's name, if there is one, to a heading."""
    return f"{heading}: {mixer}" if mixer else heading


def _source(where: str, mixer: str) -> str:
    return f"{where} ({mixer})" if mixer else where


def _drop_highest(points: Points, num_dropped: int) -> Points:
    order = np.argsort(points.losses, kind="stable")
    return points.take(np.sort(order[: max(0, len(points) - num_dropped)]))


def _fit_mixer(points: Points) -> MixerFit:
    fitted = fit(points)
    parabolas = budgets(points)
    test_loss = None if points.test_losses is None else fit_line(points.losses, points.test_losses)
    lines = {domain: fit_line(points.losses, losses) for domain, losses in points.domain_losses.items()}
    return MixerFit(
        fitted=fitted,
        uncertainty=compute_uncertainty(fitted),
        back_test=back_test(points),
        budgets=parabolas,
        best_size=best_sizes(parabolas),
        test_loss=test_loss,
        domain_losses={domain: line for domain, line in lines.items() if line is not None},
    )


def _test_loss_lines(mixers: Mapping[str, MixerFit]) -> dict[str, Line]:
    return {mixer: result.test_loss for mixer, result in mixers.items() if result.test_loss is not None}


def _differences(lines: Mapping[str, Line]) -> list[MixerPair]:
    """Return the difference of each pair of mixers, in the order of the mixers."""
    pairs = combinations(lines.items(), 2)
    return [(first, second, difference(line, other)) for (first, line), (second, other) in pairs]


def _domain_differences(mixers: Mapping[str, MixerFit]) -> list[DomainDifference]:
    """Return the difference of each pair of mixers on each test domain, domain by domain."""
    domains = dict.fromkeys(domain for result in mixers.values() for domain in result.domain_losses)
    found = []
    for domain in domains:
        lines = {m: result.domain_losses[domain] for m, result in mixers.items() if domain in result.domain_losses}
        found += [(domain, pair) for pair in _differences(lines)]
    adjusted = adjust_p_values([pair[2].p_value for _, pair in found])
    return [DomainDifference(domain, pair, p) for (domain, pair), p in zip(found, adjusted, strict=True)]


def _build_pictures(mixers: Mapping[str, MixerFit]) -> list[Picture]:
    """Build the figures of each mixer's law and parabolas, and of test loss over training loss."""
    from megatron_ext.analysis.scaling.figures import budgets_picture, law_picture, transfer_picture

    pictures: list[Picture] = []
    for mixer, result in mixers.items():
        used = {picture.name for picture in pictures}
        name = _unused_name(used, "scaling", mixer)
        pictures.append(law_picture(name, result.fitted, result.uncertainty, title(mixer, "Scaling law")))
        if result.budgets:
            name = _unused_name(used, "isoflop", mixer)
            pictures.append(budgets_picture(name, result.budgets, title(mixer, "IsoFLOP")))
    if lines := _test_loss_lines(mixers):
        pictures.append(transfer_picture("test_loss", lines))
    return pictures


def _unused_name(used: Collection[str], prefix: str, mixer: str) -> str:
    """Return an unused file name; names of mixers that differ only in punctuation would otherwise collide."""
    base = f"{prefix}_{re.sub(r'[^A-Za-z0-9.+-]+', '_', mixer)}" if mixer else prefix
    names = (f"{base}{f'_{number}' if number > 1 else ''}" for number in count(1))
    return next(name for name in names if name not in used)
