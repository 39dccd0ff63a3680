"""The command `selectron plan`, called as by a user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import RunConfig
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.planning.layouts import candidate_layouts, layout_overrides
from megatron_ext.planning.shards import Shard, whole_model

ROOT = Path(__file__).parents[2]
BIG, SMALL = str(ROOT / "examples/1p3b_100k.yaml"), str(ROOT / "examples/110m_2k.yaml")
BY_NCCL = ["parallel.context_transport=nccl", "parallel.context_exchange_rounds=1"]
ONE_GPU = ["parallel.tensor=1", "parallel.sequence=false", "parallel.context=1"]


def call(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes", "0"], "--nodes: 0 is less than 1: give 1 or more"),
        (["--gpus-per-node", "-1"], "--gpus-per-node: -1 is less than 1: give 1 or more"),
        (["--gpu", "h300"], "--gpu: 'h300' is not supported: give one of a100, h100, h200, b200"),
        (["--price", "-2"], "--price: -2.0 is not a finite number above 0: give one"),
        (["--tokens", "nan"], "--tokens: nan is not a finite number above 0: give one"),
        (
            ["--search", "--every-rank"],
            "--every-rank: cannot be combined with --search, which has many layouts: choose a layout first",
        ),
        (["--output", SMALL], f"--output: {SMALL} is not a folder: give another path"),
    ],
)
def test_invalid_options(capsys: Any, arguments: list[str], expected: str) -> None:
    code, out, err = call(capsys, SMALL, *arguments)
    assert (code, out) == (2, "")
    line = " ".join(err.split())
    for part in expected.split(": "):
        assert part in line


def test_invalid_layout_is_rejected(capsys: Any) -> None:
    code, out, err = call(capsys, BIG, "--gpus-per-node", "6")
    assert (code, out) == (2, "")
    assert "tensor 1 * pipeline 1 * context 4 = 4 processes per replica, which does not divide the world size 6" in err


def test_copy_engines_between_nodes_are_rejected(capsys: Any) -> None:
    copies = ["parallel.context=2", "parallel.context_transport=copy_engine"]
    code, out, err = call(capsys, SMALL, "--nodes", "2", "--gpus-per-node", "1", *copies)
    assert (code, out) == (2, "")
    assert "copy_engine, and tensor 1 * context 2 = 2 processes do not divide nodes of 1; choose nccl" in err


@pytest.mark.parametrize("option", [[], ["--search"]])
def test_fp8_is_rejected_for_gpu_without_fp8(capsys: Any, option: list[str]) -> None:
    code, out, err = call(capsys, SMALL, "training.fp8=blockwise", "--gpu", "a100", *option)
    assert (code, out) == (2, "")
    assert err == (
        "selectron: error: training.fp8: blockwise, but A100 GPUs do not support FP8; "
        "plan with training.fp8=none, or choose --gpu from h100, h200, b200\n"
    )


@pytest.mark.usefixtures("shared_process")
def test_plan_in_fp8(capsys: Any) -> None:
    arguments = [SMALL, "model.pattern=top1_chunk*2", "training.fp8=tensorwise", "--gpus-per-node", "1"]
    code, out, err = call(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "| weights in 8 bits " in out
    code, out, err = call(capsys, *arguments, "model.ffn_hidden_size=2056")
    assert (code, out) == (2, "")
    assert err == (
        "selectron: error: training.fp8: decoder.layers.0.mlp.linear_fc2 has 768 x 2056 weights a rank, and products "
        "in 8 bits take multiples of 16; "
        "set training.fp8=none, or change the sizes of heads or feed-forward, or parallel.tensor\n"
    )


@pytest.mark.usefixtures("shared_process")
@pytest.mark.parametrize("option", [[], pytest.param(["--search"], marks=pytest.mark.slow)])
def test_chunk_fetching_is_not_planned(capsys: Any, option: list[str]) -> None:
    fetching = ["model.pattern=top1_chunk*2", "parallel.context=2", "parallel.context_exchange=chunks"]
    code, out, err = call(capsys, SMALL, "--gpus-per-node", "2", *fetching, *option)
    expected = (
        "parallel.context_exchange: chunks, but the fetched chunks depend on the data and cannot be planned; "
        "plan with parallel.context_exchange=heads\n"
    )
    if option:  # other layouts exist
        assert code == 0
        assert f"`: {expected}" in out
    else:
        assert (code, out, err) == (2, "", f"selectron: error: {expected}")


def test_plan_is_printed_and_written(capsys: Any, tmp_path: Path) -> None:
    options = ["--gpus-per-node", "2", "--vocabulary", "50304", "--tokens", "1e9", "--price", "2"]
    code, out, err = call(capsys, SMALL, "model.pattern=top1_chunk*2", *options, "--output", str(tmp_path / "plan"))
    assert (code, err) == (0, "")
    assert "# 110m_2k on 2 x H200\n" in out
    assert "Vocabulary: 50,304 tokens (--vocabulary)." in out
    assert "**Fits**" in out
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert (tmp_path / "plan" / "plan.md").read_text() in out
    (layout,) = found["layouts"]
    (memory,) = layout["memory"]
    assert memory["total"] == sum(memory["kinds"].values())
    assert layout["seconds_per_step"] == pytest.approx(sum(layout["parts"].values()))
    hours = 1e9 / layout["tokens_per_second"] * 2 / 3600
    assert layout["gpu_hours"] == pytest.approx(hours)
    assert layout["price"] == pytest.approx(2 * hours)


@pytest.mark.usefixtures("shared_process")
def test_exit_code_if_layout_does_not_fit(capsys: Any) -> None:
    more = ["training.recompute=none", "training.global_batch_size=1", "model.pattern=attention*24"]
    code, out, _ = call(capsys, BIG, *ONE_GPU, *more, "--gpus-per-node", "1", "--gpu", "h100")
    assert code == 1
    assert "**Does not fit**: tensors of rank 0 take" in out
    assert "Rates are scaled from the H200 to the H100 by data sheets." in out


@pytest.mark.usefixtures("shared_process")
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (
            "mixers.top1_chunk.score=exact_lse",
            "Not measured: top1_chunk exact_lse. Such a mixer is timed at the median rate of the measured mixers.",
        ),
        ("training.precision=fp32", "No time: rates were measured in bf16, not in fp32."),
    ],
)
def test_report_names_unmeasured_parts(capsys: Any, field: str, expected: str) -> None:
    more = [field, "model.pattern=top1_chunk*2", "training.global_batch_size=1"]
    code, out, _ = call(capsys, BIG, *ONE_GPU, *more, "--gpus-per-node", "1")
    assert code == 0
    assert expected in out
    assert "| all |" in out


@pytest.mark.usefixtures("shared_process")
def test_search_sorts_fitting_layouts_by_speed(capsys: Any, tmp_path: Path) -> None:
    more = ["model.pattern=attention*2", "training.global_batch_size=2", "parallel.context=1", *BY_NCCL]
    options = ["--gpus-per-node", "2", "--gpu", "h100", "--search", "3", "--output", str(tmp_path)]
    code, out, _ = call(capsys, BIG, *more, *options)
    assert code == 0
    found = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    fitting = [one for one in found if one["refused"] is None]
    speeds = [one["tokens_per_second"] for one in fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert found[: len(fitting)] == fitting
    copied, by_nccl = (
        f"2 parallel.context_transport={transport} parallel.context_exchange_rounds={rounds}"
        for transport, rounds in (("copy_engine", 2), ("nccl", 1))
    )
    layouts = (
        (1, "false", 1, 1),
        (2, "true", 1, 1),
        (1, "false", copied, 1),
        (1, "false", by_nccl, 1),
        (1, "false", 1, 2),
    )
    assert {one["layout"].split(" training")[0] for one in fitting} == {
        f"parallel.tensor={t} parallel.sequence={s} parallel.context={c} parallel.pipeline={p}"
        for t, s, c, p in layouts
    }
    assert f"{len(found)} layouts: {len(fitting)} fit" in out
    assert out.count("`parallel.tensor=") >= 3


@pytest.mark.parametrize(
    ("more", "transports"),
    [
        (["model.pattern=gated_deltanet*2"], {"nccl parallel.context_exchange_rounds=1"}),  # passes recurrent states
        (
            ["model.pattern=attention*2", "model.num_query_groups=2"],  # one group per rank: only one round is possible
            {"nccl parallel.context_exchange_rounds=1", "copy_engine parallel.context_exchange_rounds=1"},
        ),
        (
            ["model.pattern=attention*2", "parallel.context_transport=copy_engine"],
            {"copy_engine parallel.context_exchange_rounds=1"},
        ),
    ],
)
@pytest.mark.usefixtures("shared_process")
def test_search_includes_copy_engines_for_head_exchange(
    capsys: Any, tmp_path: Path, more: list[str], transports: set[str]
) -> None:
    options = ["--gpus-per-node", "2", "--search", "--output", str(tmp_path)]
    code, _, _ = call(capsys, BIG, *BY_NCCL, *more, "training.global_batch_size=1", *options)
    assert code == 0
    found = [one["layout"] for one in json.loads((tmp_path / "plan.json").read_text())["layouts"]]
    shared = [layout for layout in found if "parallel.context=2" in layout]
    assert {one.partition("context_transport=")[2].partition(" parallel.pipeline")[0] for one in shared} == transports


@pytest.mark.usefixtures("shared_process")
@pytest.mark.parametrize(("configured", "planned"), [(8, 128), (190, 128), (192, 256), (256, None)])
def test_indivisible_batch_is_replaced_by_nearest(
    capsys: Any, tmp_path: Path, configured: int, planned: int | None
) -> None:
    more = ["model.pattern=attention", "training.micro_batch_size=2", f"training.global_batch_size={configured}"]
    options = ["--nodes", "32", "--output", str(tmp_path)]  # 64 replicas
    code, out, err = call(capsys, BIG, *more, *options)
    assert (code, err) == (0, "")
    expected = f"{configured} samples per step cannot be divided among the replicas: planned with "
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["tokens"] == configured * 122070 * 102400
    if planned is None:
        assert "samples per step cannot be divided" not in out
        assert found["global_batch_size"] is None
    else:
        assert f"{expected}`training.global_batch_size={planned}`." in out
        assert found["global_batch_size"] == {"configured": configured, "planned": planned}
        assert found["layouts"][0]["micro_batches"] == planned // 128


@pytest.mark.usefixtures("shared_process")
def test_search_replaces_batch_that_no_layout_divides(capsys: Any) -> None:
    """Every GPU holds a complete replica if nodes have one GPU, so no layout divides the batch."""
    more = ["model.pattern=attention", "training.global_batch_size=3", "training.micro_batch_size=1"]
    code, out, _ = call(capsys, SMALL, *more, "--nodes", "2", "--gpus-per-node", "1", "--search")
    assert code == 0
    assert (
        "3 samples per step cannot be divided among the replicas: planned with `training.global_batch_size=4`." in out
    )


LAYOUTS_NEAR = {BIG: ((1, 4, 1), (1, 8, 1), (2, 2, 1)), SMALL: ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2))}
"""Tensor, context and pipeline sizes near those of the examples.

A search over all candidates on 8 GPUs takes a minute or more.
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shared_process")
@pytest.mark.parametrize("example", [BIG, SMALL])
def test_example_layout_is_fastest_of_search(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    def near(config: RunConfig, world_size: int, per_node: int) -> Iterator[list[RunConfig]]:
        for alternatives in candidate_layouts(config, world_size, per_node):
            parallel = alternatives[0].parallel
            if (parallel.tensor, parallel.context, parallel.pipeline) in LAYOUTS_NEAR[example]:
                yield alternatives

    monkeypatch.setattr("megatron_ext.planning.plan.candidate_layouts", near)
    code, _, _ = call(capsys, example, "--gpu", "h100", "--search", "--output", str(tmp_path))
    assert code == 0
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    fitting = [one for one in layouts if one["refused"] is None]
    assert len(fitting) >= len(LAYOUTS_NEAR[example])
    fastest = [one["layout"] for one in fitting if one["tokens_per_second"] == fitting[0]["tokens_per_second"]]
    assert layout_overrides(load_config(Path(example), [], load_all())) in fastest


@pytest.mark.slow
@pytest.mark.usefixtures("shared_process")
def test_every_rank_of_128_gpus(capsys: Any) -> None:
    more = ["parallel.pipeline=4", "training.global_batch_size=64", "model.pattern=top1_chunk*3,attention"]
    more += ["parallel.tensor=2"]
    code, out, _ = call(capsys, BIG, *more, "--nodes", "16", "--every-rank")
    assert code == 0
    assert "on 128 x H200 (16 nodes of 8)" in out
    layer, norms = 4 * 2048**2 + 3 * 2048 * 5504, 2 * 2048
    least = layer // 2 + norms  # a stage over two tensor-parallel ranks: half the weights, all norms
    most = least + 50304 * 2048 // 2 + 2048  # the last stage adds the output layer and the final norm
    whole = 4 * (layer + norms) + 2 * 50304 * 2048 + 2048
    assert f"Built on each of 128 ranks: {least:,} to {most:,} parameters; {whole:,} in the whole model." in out


def shard(rank: int, stage: int, of_stage: int) -> Shard:
    return Shard(rank=rank, place=(0, 0, stage, rank), parameters=of_stage, of_stage=of_stage)


def test_inconsistent_shards_are_detected() -> None:
    assert whole_model([shard(0, 0, 5), shard(1, 0, 5), shard(2, 1, 7)]) == 12
    with pytest.raises(AssertionError, match="stages differ within themselves"):
        whole_model([shard(0, 0, 5), shard(1, 0, 6)])
    with pytest.raises(AssertionError, match="two ranks are in one place"):
        whole_model([shard(0, 0, 5), shard(0, 0, 5)])
