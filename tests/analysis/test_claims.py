"""Answers to the study's claims from intervals, and the architectures that each claim is about."""

import numpy as np
import pytest
from analysis_synthetic import Synthetic, write_run

from megatron_ext.analysis.claims import CLAIMS, answer, findings
from megatron_ext.analysis.matched import compare
from megatron_ext.analysis.runs import read_runs


@pytest.mark.parametrize(
    ("expected", "low", "high", "answered"),
    [
        ("higher", 0.001, 0.2, "supported"),
        ("higher", -0.001, 0.2, "not resolved"),
        ("higher", -0.1, 0.0039, "contradicted"),  # a difference of 0.004 is excluded
        ("lower", -0.2, -0.001, "supported"),
        ("lower", -0.2, 0.001, "not resolved"),
        ("lower", -0.0039, 0.1, "contradicted"),
        ("same", -0.0039, 0.0039, "supported"),
        ("same", -0.0039, 0.0041, "not resolved"),
        ("same", 0.0041, 0.2, "contradicted"),
        ("same", -0.2, -0.0041, "contradicted"),
        ("higher", 0.0001, 0.0039, "contradicted"),  # within what the study calls equal
        ("higher", np.nan, np.nan, "not resolved"),
    ],
)
def test_answer(expected, low, high, answered):
    assert answer(expected, low, high) == answered


def test_each_architecture_belongs_to_its_claim(tmp_path):
    architectures = [
        ("attention*4", {}),
        ("attention*4", {"attention": {"window": 64}}),
        ("attention*4", {"attention": {"random_keys": True}}),
        ("attention*4", {"attention": {"temperature": 0.5}}),
        ("top1_element*4", {}),
        ("top1_chunk*4", {"top1_chunk": {"score": "exact"}}),
        ("top1_chunk*4", {"top1_chunk": {"score": "approx"}}),
        ("rwkv7*4", {}),
        ("(mamba,attention)*2", {}),
    ]
    folders = [
        write_run(tmp_path / str(index), Synthetic(name=str(index), pattern=pattern, mixers=mixers, gap=0.1 * index))
        for index, (pattern, mixers) in enumerate(architectures)
    ]
    found = findings(compare(read_runs(folders)))
    numbers = [(CLAIMS.index(finding.claim), round(10 * finding.measured.gap.value[-1])) for finding in found]
    assert numbers == [(0, 7), (1, 4), (2, 5), (3, 6), (4, 1), (5, 2), (6, 3)]  # a hybrid is in no claim
    assert [finding.answer for finding in found] == [
        "supported",
        *["contradicted"] * 2,
        *["supported"] * 3,
        "contradicted",
    ]


def test_claims_need_attention_as_the_baseline(tmp_path):
    """Without it, the gap of GLA to Mamba says nothing about attention."""
    runs = [Synthetic(name=name, pattern=f"{name}*4", gap=gap) for name, gap in (("mamba", 0.0), ("gla", 0.1))]
    assert findings(compare(read_runs([write_run(tmp_path / run.name, run) for run in runs]))) == []


def test_claims_are_about_one_setting(tmp_path):
    both = {"attention": {"window": 64, "temperature": 0.5}}
    chunks = {"top1_chunk": {"score": "exact", "top_k": 4}}
    runs = [
        Synthetic(),
        Synthetic(mixers=both, name="both"),
        Synthetic(pattern="top1_chunk*4", mixers=chunks, name="k"),
    ]
    assert findings(compare(read_runs([write_run(tmp_path / run.name, run) for run in runs]))) == []
