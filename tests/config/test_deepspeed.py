"""DeepSpeed configuration: values from the run, the user's file, and refused entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.deepspeed import deepspeed_config, disk_sections
from megatron_ext.config.schema import OptimizerConfig, TrainingConfig
from megatron_ext.utils.errors import UserError

TRAINING = TrainingConfig(global_batch_size=32, micro_batch_size=4, precision="bf16")


def merged(tmp_path: Path, content: Any, sharding: Any = "zero2", **fields: Any) -> dict[str, Any]:
    path = tmp_path / "deepspeed.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    optimizer = OptimizerConfig(sharding=sharding, deepspeed=str(path), **fields)
    return deepspeed_config(optimizer, TRAINING, num_micro_batches=2)


@pytest.mark.parametrize(("sharding", "stage"), [("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_deepspeed_config_without_file(sharding: Any, stage: int) -> None:
    found = deepspeed_config(OptimizerConfig(sharding=sharding, clip_grad=0.5), TRAINING, 2)
    assert found["zero_optimization"]["stage"] == stage
    assert found["gradient_clipping"] == 0.5
    assert found["bf16"] == {"enabled": True}
    assert found["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "offload_optimizer" not in found["zero_optimization"]


def test_offload_of_the_run() -> None:
    optimizer = OptimizerConfig(sharding="zero3", offload="cpu", offload_parameters="cpu")
    zero = deepspeed_config(optimizer, TRAINING, 2)["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"


def test_sections_on_disk() -> None:
    nvme, zero = {"device": "nvme", "nvme_path": "/local"}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert disk_sections(zero) == {}
    assert disk_sections({**zero, "offload_param": nvme}) == {"offload_param": nvme}
    assert list(disk_sections({"offload_optimizer": nvme, "offload_param": nvme})) == [
        "offload_optimizer",
        "offload_param",
    ]


def test_other_deepspeed_settings_are_kept(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": "/local", "buffer_count": 5}
    content = {"zero_optimization": {"offload_optimizer": nvme, "sub_group_size": 1000}, "steps_per_print": 7}
    found = merged(tmp_path, content, "zero3")
    assert found["zero_optimization"] == {"stage": 3, "offload_optimizer": nvme, "sub_group_size": 1000}
    assert found["steps_per_print"] == 7


def test_auto_and_equal_settings(tmp_path: Path) -> None:
    content = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False, "loss_scale": 0},
        "optimizer": {"type": "adamw", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": "auto"},
    }
    found = merged(tmp_path, content)
    assert found["gradient_accumulation_steps"] == 1  # the schedule accumulates over micro-batches
    assert found["gradient_clipping"] == 1.0
    assert found["bf16"] == {"enabled": True}
    assert found["zero_optimization"]["stage"] == 2
    assert "optimizer" not in found
    assert "train_batch_size" not in found


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        ({"train_batch_size": 64}, "train_batch_size", "64.*32"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "4.*2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping", "0.5.*1.0"),
        ({"bf16": {"enabled": False}}, "bf16.enabled", "false.*true"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "3.*2"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "bf16.*fp32"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "Lamb.*AdamW"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, "optimizer.params.lr", "0.1.*0.0003"),
        ({"fp16": {"enabled": True}}, "fp16", "training.precision"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "optimizer.schedule"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "parallel.tensor"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_contradicting_settings_are_rejected(tmp_path: Path, content: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        merged(tmp_path, content)
    assert raised.value.where == f"{tmp_path / 'deepspeed.json'}: {field}"


def test_contradicting_offload_is_rejected(tmp_path: Path) -> None:
    content = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}}
    with pytest.raises(UserError, match=r"nvme.*cpu"):
        merged(tmp_path, content, "zero3", offload="cpu")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
        ({"zero_optimization": {"sub_group_size": 5}}, "zero_optimization.sub_group_size"),
    ],
)
def test_zero1_rejects_engine_settings(tmp_path: Path, content: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match="engine") as raised:
        merged(tmp_path, content, "zero1")
    assert raised.value.where.endswith(f": {field}")
    assert merged(tmp_path, {"zero_optimization": {"allgather_bucket_size": 7}}, "zero1")["zero_optimization"] == {
        "stage": 1,
        "allgather_bucket_size": 7,
        "overlap_comm": False,
    }


def test_zero1_buckets_with_offload(tmp_path: Path) -> None:
    content = {"zero_optimization": {"reduce_bucket_size": 7}}
    with pytest.raises(UserError, match="all at once") as raised:
        merged(tmp_path, content, "zero1")
    assert raised.value.where.endswith(": zero_optimization.reduce_bucket_size")
    assert merged(tmp_path, content, "zero1", offload="cpu")["zero_optimization"]["reduce_bucket_size"] == 7
    assert merged(tmp_path, content, "zero2")["zero_optimization"]["reduce_bucket_size"] == 7


@pytest.mark.parametrize(
    ("sharding", "section", "device"),
    [
        ("zero1", "offload_optimizer", "nvme"),
        ("zero2", "offload_optimizer", "nvme"),
        ("zero2", "offload_param", "cpu"),
        ("zero2", "offload_param", "nvme"),
    ],
)
def test_parameter_offload_requires_stage_3(tmp_path: Path, sharding: str, section: str, device: str) -> None:
    content = {"zero_optimization": {section: {"device": device, "nvme_path": "/local"}}}
    with pytest.raises(UserError, match=f"{device}, .* only at stage 3") as raised:
        merged(tmp_path, content, sharding)
    assert raised.value.where.endswith(f": zero_optimization.{section}.device")
    assert merged(tmp_path, content, "zero3")["zero_optimization"][section]["device"] == device


def test_no_prefetch_from_disk(tmp_path: Path) -> None:
    zero: dict[str, Any] = {"offload_param": {"device": "nvme", "nvme_path": "/local"}}
    assert (
        merged(tmp_path, {"zero_optimization": zero}, "zero3")["zero_optimization"]["stage3_prefetch_bucket_size"] == 0
    )
    zero["stage3_prefetch_bucket_size"] = 5
    with pytest.raises(UserError, match=r"5, .*set it to 0") as raised:
        merged(tmp_path, {"zero_optimization": zero}, "zero3")
    assert raised.value.where.endswith(": zero_optimization.stage3_prefetch_bucket_size")
    zero["offload_param"]["device"] = "cpu"
    assert (
        merged(tmp_path, {"zero_optimization": zero}, "zero3")["zero_optimization"]["stage3_prefetch_bucket_size"] == 5
    )


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_disk_offload_requires_folder(tmp_path: Path, section: str) -> None:
    with pytest.raises(UserError, match="give a folder") as raised:
        merged(tmp_path, {"zero_optimization": {section: {"device": "nvme"}}}, "zero3")
    assert raised.value.where.endswith(f": zero_optimization.{section}.nvme_path")


@pytest.mark.parametrize(
    ("zero", "field"), [(3, "zero_optimization"), ({"offload_param": "nvme"}, "zero_optimization.offload_param")]
)
def test_section_must_be_object(tmp_path: Path, zero: Any, field: str) -> None:
    with pytest.raises(UserError, match="is not an object") as raised:
        merged(tmp_path, {"zero_optimization": zero}, "zero3")
    assert raised.value.where.endswith(f": {field}")
    assert merged(tmp_path, {"zero_optimization": {"offload_param": None}}, "zero3")["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[]", "contains a list")])
def test_invalid_deepspeed_file(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        merged(tmp_path, content)


def test_missing_deepspeed_file(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(sharding="zero2", deepspeed=str(tmp_path / "none.json"))
    with pytest.raises(UserError, match=r"none\.json cannot be read \(No such file"):
        deepspeed_config(optimizer, TRAINING, 2)
