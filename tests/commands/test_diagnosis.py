"""Command `selectron doctor`, and reports of the implementations that ops select."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from kernels.common import fla
from kernels.common.dispatch import Choice, choose, recorded_choices
from kernels.softmax_attention import softmax_attention
from megatron_ext.commands.op_choices import implementations
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.platform.device import Platform, select_platform

PRETENDED_GPU = Platform(torch.device("cuda", 0), "gloo")


def test_doctor_names_what_each_mixer_uses() -> None:
    # Use a separate process, because the command creates a process group.
    command = [sys.executable, "-m", "megatron_ext.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    _, _, mixers = done.stdout.partition("with default settings:\n")
    lines = [line.split(maxsplit=1) for line in mixers.splitlines()]
    assert list(dict.fromkeys(name for name, _ in lines)) == sorted(load_all())
    if not torch.cuda.is_available():
        reason = "(triton's kernels need a GPU, and the inputs are on cpu)"
        found = [text for name, text in lines if name == "mamba"]
        assert found == [f"short_convolution: reference {reason}", f"selective_scan: chunked {reason}"]
        assert dict(lines)["attention"] == "softmax_attention: sdpa (plain causal attention, fused on cpu as well)"
        assert dict(lines)["moba"] == f"top1_chunk_attention: reference {reason}"
        assert dict(lines)["nsa"].startswith("native_sparse_attention: reference (triton's kernels need a GPU")
    versions = dict(line.split(maxsplit=1) for line in done.stdout.partition("\n\n")[0].splitlines())
    assert versions["torch"].split()[0] == version("torch")
    assert versions["fla"] == f"and triton          {fla.triton_limits(version('triton'))}"


@pytest.mark.parametrize(
    ("release", "limits"),
    [
        ("3.2.0", "warns that errors may occur; avoids kernels of 8 warps on Blackwell GPUs, where they race"),
        (
            "3.4.0",
            "refuses gradients of per-head decays on Hopper GPUs; avoids kernels of 8 warps on Blackwell GPUs, "
            "where they race",
        ),
        (
            "3.7.1",
            "avoids tiles that are miscompiled on Hopper GPUs; avoids kernels of 8 warps on Blackwell GPUs, where "
            "they race",
        ),
        ("3.8.0", "refuses and avoids nothing"),
    ],
)
def test_limits_of_fla_depend_on_triton(release: str, limits: str) -> None:
    assert fla.triton_limits(release) == f"under Triton {release}, fla 0.6.0 {limits}"


def test_limits_of_fla_are_those_of_the_pinned_release() -> None:
    """Search the sources for comparisons of Triton versions again when the pin changes."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"fla-core=={fla.CHECKED_RELEASE}" in pins


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
    assert outer[0][1] == Choice("reference", "requested")


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1"])
def test_a_gpu_needs_no_launch(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    if not torch.cuda.is_available():
        select_platform("cpu")  # replaces the CUDA device that Megatron asks for
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fla, "is_installed", lambda: True)
    monkeypatch.setattr(fla, "version", {"triton": release}.__getitem__)
    fla.hopper_unsupported_reason.cache_clear()
    try:
        found = {name: [(op, choice.name) for op, choice in of] for name, of in implementations(PRETENDED_GPU)}
    finally:
        fla.hopper_unsupported_reason.cache_clear()
    assert list(found) == sorted(load_all())
    assert found["top1_chunk"] == [("top1_chunk_attention", "triton")]
    assert found["nsa"] == [("native_sparse_attention", "triton"), ("softmax_attention", "flex")]
    assert found["gla"] == [("gated_linear_attention", "fla")]
    assert found["rwkv7"] == [("rwkv7", "fla")]
    whole_heads = "chunked" if release == "3.6.0" else "fla"
    assert found["mamba2"] == [("short_convolution", "triton"), ("gated_linear_attention", whole_heads)]
