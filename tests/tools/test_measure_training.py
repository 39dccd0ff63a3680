"""Rows of `measure_training` equal the configurations of the stored reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measure_training
import pytest
from measure_training import CONFIG, MODELS, ONE_GPU, ROOT, row

from megatron_ext.bench.train.run import Variant, read_variants
from megatron_ext.config.derive import derive

TRAINING = ROOT / "docs" / "benchmarks" / "training"
STORED = [
    *[("2k_5dfa910", f"2k_{name}", name, 2048) for name in ("megatron", "hybrid")],
    *[("8k_two_gpus_5dfa910", f"8k_{name}", name, 8192) for name in ("megatron", "attention", "exact")],
    *[("dp4_6768b71", f"2k_{name}", name, 2048) for name in ("megatron", "approx", "gdn", "hybrid")],
    ("dp4_2_6768b71", "32k_rwkv7", "rwkv7_block", 32768),
    *[("100k_ed2e6a3", name, name, 102400) for name in ("megatron", "attention", "approx", "exact", "rwkv7_block")],
    *[("100k_gdn_d52b783", name, name, 102400) for name in ("gdn", "hybrid")],
    ("100k_two_gpus_4f0b591", "approx_copies_2", "approx", 102400),
    ("two_gpus_6768b71", "100k_hybrid", "hybrid", 102400),
    ("32k_two_gpus_5dfa910", "100k_gdn", "gdn", 102400),
    ("100k_four_gpus_ea7afd2", "exact_copies_2", "exact", 102400),
    ("100k_four_gpus_2_ea7afd2", "rwkv7_block_copies_2", "rwkv7_block", 102400),
    ("100k_four_gpus_2_ea7afd2", "gdn_states", "gdn", 102400),
    ("100k_megatron_four_gpus_5dfa910", "100k_megatron", "megatron", 102400),
]
"""Report, its variant, model and sequence length."""


def variant(arguments: list[str], processes: int) -> Variant:
    option, text = arguments
    texts = {"--plain": ([], [text]), "--variant": ([text], [])}[option]
    (found,) = read_variants(ROOT / CONFIG, ONE_GPU, texts[0], processes, texts[1])
    return found


@pytest.mark.parametrize(
    ("report", "stored", "model", "length"), STORED, ids=[f"{case[0]}-{case[1]}" for case in STORED]
)
def test_row_equals_stored_configuration(
    report: str, stored: str, model: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    rows = json.loads((TRAINING / f"{report}.json").read_text())["rows"]
    (measured,) = [each for each in rows if each["variant"] == stored]
    found = variant(row(model, length, measured["processes"]), measured["processes"])
    assert found.error is None
    assert found.config is not None
    assert found.plain == measured["plain_megatron"]
    config, stored_config = derive(found.config), measured["configuration"]
    assert config.data.seq_length == stored_config["data"]["seq_length"] == length
    _assert_equal(config.model, stored_config["model"])
    _assert_equal(config.parallel, stored_config["parallel"])
    for field in ("global_batch_size", "micro_batch_size", "recompute", "fp8"):
        assert getattr(config.training, field) == stored_config["training"].get(field, "none")
    if "top1_chunk" in stored_config["model"]["pattern"]:
        assert config.mixers["top1_chunk"]["score"] == stored_config["mixers"]["top1_chunk"]["score"]


def _assert_equal(section: Any, expected: dict[str, Any]) -> None:
    for field, value in expected.items():
        assert getattr(section, field) == value, field


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("length", [2048, 8192, 32768, 102400])
def test_rows_are_valid(processes: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in MODELS:
        assert variant(row(name, length, processes), processes).error is None


def test_command_has_row_for_each_model_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[list[str], Path]] = []

    class Done:
        returncode = 3

    def run(arguments: list[str], *, cwd: Path, check: bool) -> Done:
        ran.append((arguments, cwd))
        return Done()

    monkeypatch.setattr("measure_training.subprocess.run", run)
    options = ["--processes", "2", "--seq-length", "2048", "8192", "--models", "megatron", "approx"]
    monkeypatch.setattr("sys.argv", ["measure_training.py", *options, "--output", str(tmp_path)])
    assert measure_training.main() == 3
    ((arguments, cwd),) = ran
    assert cwd == ROOT
    names = [
        arguments[at + 1].partition(":")[0] for at, word in enumerate(arguments) if word in ("--plain", "--variant")
    ]
    assert names == ["2k_megatron", "2k_approx", "8k_megatron", "8k_approx"]
    assert arguments[-2:] == ["--output", str(tmp_path)]
