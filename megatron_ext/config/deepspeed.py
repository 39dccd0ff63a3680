"""DeepSpeed configuration of a run, with the user's own file merged into it.

A value of the file may be `"auto"`, as in Hugging Face's integration. It is replaced by the run's value. A value that
contradicts the run is refused by name. Fields that the run does not set are passed to DeepSpeed unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.schema import OptimizerConfig, TrainingConfig
from megatron_ext.utils.atomic_files import MAX_VOCABULARY_BYTES, os_error_reason, read_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

_OFFLOAD_OF_STAGE_3 = {"offload_optimizer": ("nvme",), "offload_param": ("cpu", "nvme")}
"""Offload devices that DeepSpeed only supports at stage 3. At lower stages it would not move the state."""

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO stage by `optimizer.sharding`."""

AUTO = "auto"

_RESERVED_SECTIONS = {
    "scheduler": "the schedule is the run's: optimizer.schedule",
    "fp16": "the run's precision is bf16 or fp32: training.precision",
    "amp": "the run's precision is bf16 or fp32: training.precision",
    "torch_autocast": "the run's precision is bf16 or fp32: training.precision",
    "tensor_parallel": "the layout is Megatron's: parallel.tensor",
    "sequence_parallel_size": "the layout is Megatron's: parallel.context",
    "pipeline": "the layout is Megatron's: parallel.pipeline",
    "elasticity": "the batch is the run's: training.global_batch_size",
    "checkpoint": "checkpoints are the run's: training.checkpoint_every",
}
"""Sections that would replace functions of the run, with the configuration field that sets each."""

_ZERO1_FIELDS = {"stage", "reduce_bucket_size", "allgather_bucket_size", "offload_optimizer", "overlap_comm"}
"""Fields of `zero_optimization` that DeepSpeed's optimizer supports without its engine.

`overlap_comm` may only be false, which is the run's own value.
"""

_PREFETCH_FIELD = "stage3_prefetch_bucket_size"
"""Field that must be 0 if parameters are on NVMe.

The prefetch queue contains the last parameters twice, for forward and backward. DeepSpeed requests a second buffer for
them, which fails an assertion.
"""

_REASONS = {
    f"zero_optimization.{_PREFETCH_FIELD}": "DeepSpeed's prefetch from disk fails when backward follows forward",
}
"""Reason for the value of a field that no field of the run's own configuration sets."""

_OPTIMIZER_TYPES = {"adamw": "AdamW"}
"""DeepSpeed's name of an optimizer, where it differs from `optimizer.name`."""

_PRINT_FIELDS = {"steps_per_print", "wall_clock_breakdown"}
"""Fields of the engine that only affect what is printed. zero1 may ignore them."""


def deepspeed_config(optimizer: OptimizerConfig, training: TrainingConfig, num_micro_batches: int) -> dict[str, Any]:
    """Return the complete configuration for DeepSpeed.

    Args:
        optimizer: `sharding` is one of `STAGES`.
        training: training section of the run.
        num_micro_batches: micro-batches per data-parallel rank and step.

    Raises:
        UserError: the user's file cannot be read, or contradicts the run.
    """
    settings = _run_settings(optimizer, training)
    if optimizer.deepspeed is None:
        return settings
    path = Path(optimizer.deepspeed)
    file_settings = _read(path)
    _reject_unsupported(file_settings, optimizer, path)
    if "offload_param" in disk_sections(file_settings.get("zero_optimization") or {}):
        settings["zero_optimization"][_PREFETCH_FIELD] = 0
    batches = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
    }
    _reject_contradictions(file_settings, {**settings, **batches, "optimizer": _optimizer_settings(optimizer)}, path)
    other_settings = {key: value for key, value in file_settings.items() if key not in {*batches, "optimizer"}}
    return _merge(settings, other_settings)


def disk_sections(zero: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the sections of DeepSpeed's `zero_optimization` with state on a local disk (NVMe), by name."""
    return {name: zero[name] for name in _OFFLOAD_OF_STAGE_3 if (zero.get(name) or {}).get("device") == "nvme"}


def _run_settings(optimizer: OptimizerConfig, training: TrainingConfig) -> dict[str, Any]:
    stage = STAGES[optimizer.sharding]
    zero: dict[str, Any] = {"stage": stage}
    if stage == 1:
        zero["overlap_comm"] = False  # Megatron sums some gradients before they are reduced
    if optimizer.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    if optimizer.offload_parameters == "cpu":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        # The schedule accumulates over micro-batches. For DeepSpeed all of them are one batch.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optimizer.clip_grad,
        "bf16": {"enabled": training.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW has a fused CPU implementation, too
    }


def _optimizer_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    parameters = {
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }
    return {"type": _OPTIMIZER_TYPES.get(optimizer.name, optimizer.name), "params": parameters}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_regular(path, MAX_VOCABULARY_BYTES))
    except OSError as error:
        hint = "give a file with DeepSpeed's configuration, or remove it"
        raise UserError("optimizer.deepspeed", f"{path} cannot be read ({os_error_reason(error)})", hint) from error
    except ValueError as error:
        raise UserError(str(path), f"is not JSON ({error})", "fix it, or remove optimizer.deepspeed") from error
    if not isinstance(content, dict):
        problem = f"contains a {type(content).__name__}, not an object"
        raise UserError(str(path), problem, "give DeepSpeed's configuration")
    return content


def _reject_unsupported(file_settings: Mapping[str, Any], optimizer: OptimizerConfig, path: Path) -> None:
    for name, reason in _RESERVED_SECTIONS.items():
        section = file_settings.get(name)
        is_off = section is None or (isinstance(section, dict) and section.get("enabled") is False)
        if not is_off:
            raise UserError(f"{path}: {name}", reason, "remove it from the file")
    _reject_offload(file_settings, optimizer.sharding, path)
    if optimizer.sharding == "zero1":
        for name, reason, hint in _ignored_by_zero1(file_settings, optimizer, path):
            raise UserError(f"{path}: {name}", reason, hint)


def _reject_offload(file_settings: Mapping[str, Any], sharding: str, path: Path) -> None:
    """Refuse offloading that DeepSpeed ignores at this stage, or that lacks an `nvme_path`."""
    for section, devices in _OFFLOAD_OF_STAGE_3.items():
        device = _section(file_settings, path, "zero_optimization", section).get("device")
        if device in devices and sharding != "zero3":
            where, reason = f"zero_optimization.{section}.device", f"{device}, which DeepSpeed supports only at stage 3"
            raise UserError(f"{path}: {where}", reason, "set optimizer.sharding=zero3, or another device")
    for section, offload in disk_sections(_section(file_settings, path, "zero_optimization")).items():
        if not offload.get("nvme_path"):
            where = f"{path}: zero_optimization.{section}.nvme_path"
            raise UserError(where, "is missing, but the device is nvme", "give a folder on a local disk")


def _ignored_by_zero1(
    file_settings: Mapping[str, Any], optimizer: OptimizerConfig, path: Path
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, reason, hint) of each field that would have no effect under zero1."""
    engine_only = "is read by DeepSpeed's engine, which zero1 does not use"
    hint = "remove it from the file, or set optimizer.sharding=zero2"
    known = {*_run_settings(OptimizerConfig(sharding="zero1"), TrainingConfig()), "train_batch_size", "optimizer"}
    yield from (
        (name, engine_only, hint)
        for name in file_settings
        if name not in known | _PRINT_FIELDS | _RESERVED_SECTIONS.keys()
    )
    zero = _section(file_settings, path, "zero_optimization")
    is_offloaded = optimizer.offload != "none" or "offload_optimizer" in zero
    for name in zero:
        if name not in _ZERO1_FIELDS:
            yield f"zero_optimization.{name}", engine_only, hint
        elif name == "reduce_bucket_size" and not is_offloaded:
            reason = "zero1 reduces gradients in buckets only if the optimizer is offloaded, otherwise all at once"
            yield f"zero_optimization.{name}", reason, "remove it from the file"


def _section(file_settings: Mapping[str, Any], path: Path, *names: str) -> Mapping[str, Any]:
    """Return a section of the file, empty if it is absent."""
    section: Any = file_settings
    for depth, name in enumerate(names, start=1):
        section = section.get(name) or {}
        if not isinstance(section, Mapping):
            where = f"{path}: {'.'.join(names[:depth])}"
            raise UserError(where, f"{json.dumps(section)} is not an object", "give DeepSpeed's section, or remove it")
    return section


def _reject_contradictions(file_settings: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> None:
    for name, value, setting in _common_fields(file_settings, settings):
        if value != AUTO and not _is_same_setting(value, setting):
            problem = f"the run's configuration has {json.dumps(setting)}"
            hint = "change the run's configuration, or remove it from the file"
            if name in _REASONS:
                problem, hint = _REASONS[name], f"set it to {json.dumps(setting)}, or remove it from the file"
            raise UserError(f"{path}: {name}", f"{json.dumps(value)}, but {problem}", hint)


def _common_fields(
    file_settings: Mapping[str, Any], settings: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name, setting in settings.items():
        if name not in file_settings:
            continue
        if isinstance(setting, Mapping) and isinstance(file_settings[name], Mapping):
            yield from _common_fields(file_settings[name], setting, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", file_settings[name], setting


def _is_same_setting(value: Any, setting: Any) -> bool:
    if isinstance(value, str) and isinstance(setting, str):
        return value.lower() == setting.lower()
    return bool(value == setting) and isinstance(value, bool) == isinstance(setting, bool)


def _merge(settings: Mapping[str, Any], file_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both configurations recursively. Values of `settings` take precedence over those of `file_settings`."""
    merged = {name: value for name, value in file_settings.items() if value != AUTO}
    for name, setting in settings.items():
        both = isinstance(setting, Mapping) and isinstance(file_settings.get(name), Mapping)
        merged[name] = _merge(setting, file_settings[name]) if both else setting
    return merged
