"""Candidate layouts of a search."""

from __future__ import annotations

from megatron_ext.config.layout import model_parallel_size
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_ext.planning.layouts import candidate_layouts, layout_overrides, use_copy_engines


def config(micro_batch_size: int = 1) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=""),
        model=ModelConfig(pattern="attention*4", num_attention_heads=4),
        training=TrainingConfig(global_batch_size=8, micro_batch_size=micro_batch_size),
    )


def layouts(world_size: int, per_node: int) -> list[tuple[int, int, int]]:
    found = [alternatives[0].parallel for alternatives in candidate_layouts(config(), world_size, per_node)]
    return [(one.tensor, one.context, one.pipeline) for one in found]


def test_one_gpu_has_one_layout() -> None:
    assert layouts(1, 1) == [(1, 1, 1)]


def test_all_layouts_of_four_gpus() -> None:
    expected = {(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 1), (1, 2, 2), (1, 4, 1)}
    expected |= {(2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    found = layouts(4, 4)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_layout_limits() -> None:
    for tensor, context, pipeline in layouts(64, 8):
        assert tensor * context <= 8
        assert tensor <= 4
        assert pipeline <= 4


def test_alternatives_differ_only_in_recomputation() -> None:
    for alternatives in candidate_layouts(config(4), 8, 8):
        assert [one.training.recompute for one in alternatives] == ["none", "mlp", "full"]
        assert len({(str(one.parallel), one.training.micro_batch_size) for one in alternatives}) == 1
        first = alternatives[0]
        assert first.parallel.sequence == (first.parallel.tensor > 1)
        assert 8 % model_parallel_size(first.parallel) == 0
    sizes = {alternatives[0].training.micro_batch_size for alternatives in candidate_layouts(config(4), 8, 8)}
    assert sizes == {1, 4}


def test_layout_overrides() -> None:
    last = [alternatives[-1] for alternatives in candidate_layouts(config(), 4, 4)][-1]
    assert layout_overrides(last) == (
        "parallel.tensor=4 parallel.sequence=true parallel.context=1 parallel.pipeline=1 "
        "training.micro_batch_size=1 training.recompute=full"
    )


def test_layout_overrides_with_context_parallelism() -> None:
    (shared,) = [one[0] for one in candidate_layouts(config(), 4, 4) if one[0].parallel.context == 4]
    copied = use_copy_engines(shared, 2)
    for one, exchange in (
        (shared, "nccl parallel.context_exchange_rounds=1"),
        (copied, "copy_engine parallel.context_exchange_rounds=2"),
    ):
        assert layout_overrides(one) == (
            f"parallel.tensor=1 parallel.sequence=false parallel.context=4 parallel.context_transport={exchange} "
            "parallel.pipeline=1 training.micro_batch_size=1 training.recompute=none"
        )
