"""Synthetic studies: intervals cover the known gap, and no answer is wrong more often than stated."""

from coverage_of_studies import Noise, Study, constant, study_coverage


def test_intervals_with_three_seeds_cover_the_truth():
    """Forty studies of two gaps: fewer than 31 of 40 hits would occur in one of 10,000 runs with coverage 0.95."""
    study = Study(constant(0.02), speeds=(0.9, 1.1), seeds=3, evaluations=8, documents=30, noise=Noise(seed=0.02))
    found = study_coverage(study, 40)
    assert found["all at once"] >= 0.8
    assert found["headline"] >= 0.85
    assert found["wrong"] <= 0.1
