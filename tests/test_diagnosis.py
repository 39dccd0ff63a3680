"""Command `selectron doctor`, and reports of the implementations that ops select."""

from __future__ import annotations

import subprocess
import sys

import torch

from kernels.dispatch import Choice, choose, recorded_choices
from kernels.softmax_attention import softmax_attention
from megatron_ext.mixers.registry import load_all


def test_doctor_names_what_each_mixer_uses() -> None:
    # Use a separate process, because the command creates a process group.
    command = [sys.executable, "-m", "megatron_ext.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    _, _, mixers = done.stdout.partition("with its default settings:\n")
    lines = [line.split(maxsplit=1) for line in mixers.splitlines()]
    assert list(dict.fromkeys(name for name, _ in lines)) == sorted(load_all())
    if not torch.cuda.is_available():
        reason = "(triton's kernels need a GPU, and the inputs are on cpu)"
        found = [text for name, text in lines if name == "mamba"]
        assert found == [f"short_convolution: reference {reason}", f"selective_scan: chunked {reason}"]
        assert dict(lines)["attention"] == "softmax_attention: sdpa (plain causal: fused here too)"
        assert dict(lines)["moba"] == f"top1_chunk_attention: reference {reason}"
        assert dict(lines)["nsa"].startswith("native_sparse_attention: reference (triton's kernels need a GPU")
    assert "torch" in done.stdout.partition("\n\n")[0]


def test_records_hold_the_choices_of_their_time() -> None:
    q = torch.zeros(1, 3, 2, 4)
    with recorded_choices() as outer:
        softmax_attention(q, q, q, implementation="reference")
        with recorded_choices() as inner:
            choose("an op", "auto", ["fast"], Choice("fast", "it is there"), "slow")
        softmax_attention(q, q, q, window=2)
    softmax_attention(q, q, q)
    assert inner == [("an op", Choice("fast", "it is there"))]
    assert [name for name, _ in outer] == ["softmax_attention", "an op", "softmax_attention"]
    assert outer[0][1] == Choice("reference", "asked for")
