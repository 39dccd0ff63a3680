"""Variance of a ratio of sums over documents, compared with explicit matrices and with simulation."""

from __future__ import annotations

import coverage_of_documents
import numpy as np
import pytest
import scipy  # its parts are imported at first use, not in each worker

from megatron_ext.utils.ratio_interval import ratio_interval, ratio_variance


def random_losses(documents: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = np.ceil(np.exp(rng.normal(6.0, 1.2, documents)))
    return tokens * rng.normal(3.0, 0.5, documents), tokens


@pytest.mark.parametrize("documents", [3, 8, 40])
def test_variance_and_degrees_of_freedom_in_matrix_form(documents: int) -> None:
    nats, tokens = random_losses(documents)
    total = tokens.sum()
    rest_of = np.eye(documents) - np.outer(tokens, np.ones(documents)) / total  # residuals of the ratio
    reduce = np.diag(1 / np.sqrt(1 - tokens / total))
    form = (reduce @ rest_of).T @ (reduce @ rest_of) / total**2
    spread = ratio_variance(nats, tokens)
    assert float(spread.variance) == pytest.approx(nats @ form @ nats, rel=1e-10)
    varied = form @ np.diag(tokens**2)  # equal variance of documents' mean losses
    degrees_of_freedom = np.trace(varied) ** 2 / np.trace(varied @ varied)
    assert float(spread.degrees_of_freedom) == pytest.approx(degrees_of_freedom, rel=1e-10)
    low, high = ratio_interval(nats, tokens, 0.9) or (0, 0)
    assert low + high == pytest.approx(2 * nats.sum() / total)
    assert (high - low) / 2 == pytest.approx(scipy.stats.t.ppf(0.95, degrees_of_freedom) * np.sqrt(nats @ form @ nats))


def test_documents_of_equal_length_have_the_interval_of_a_mean() -> None:
    losses = np.random.default_rng(1).normal(3.0, 0.4, 9)
    expected = scipy.stats.t.interval(0.95, 8, losses.mean(), losses.std(ddof=1) / 3)
    assert ratio_interval(50 * losses, np.full(9, 50.0), 0.95) == pytest.approx(expected)


@pytest.mark.parametrize("documents", [1, 2])
def test_one_or_two_documents_have_no_interval(documents: int) -> None:
    nats, tokens = random_losses(documents)
    assert ratio_interval(nats, tokens, 0.95) is None
    assert ratio_interval(np.append(nats, 0.0), np.append(tokens, 0.0), 0.95) is None  # a document without tokens


def test_variance_of_a_sum_of_independent_estimates() -> None:
    one, other = (ratio_variance(*random_losses(n, n)) for n in (5, 30))
    both = one + other
    assert float(both.variance) == pytest.approx(float(one.variance + other.variance))
    assert (
        float(one.degrees_of_freedom)
        < float(both.degrees_of_freedom)
        < float(one.degrees_of_freedom + other.degrees_of_freedom)
    )
    assert np.isnan((one + ratio_variance(*random_losses(2))).half_width(0.95))


@pytest.mark.parametrize("documents", [5, 20, 200])
def test_interval_coverage(documents: int) -> None:
    """Coverage over 400 corpora of varied documents. A percentile bootstrap has 0.77 with five and 0.86 with twenty."""
    assert 0.92 <= coverage_of_documents.ratio_coverage(documents, 400) <= 0.99
