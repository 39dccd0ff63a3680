"""Configuration files in a run folder: the current one and those it replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_ext.config.save import save_config, to_yaml
from megatron_ext.config.schema import RunConfig
from megatron_ext.run_folder.layout import CONFIG
from megatron_ext.utils.atomic_files import read_regular

_UNTIL_PREFIX = "config.until_step_"


def save_run_config(config: RunConfig, folder: Path, step: int) -> None:
    """Write the configuration of a run that has completed `step` steps.

    If the previous configuration differs, it is kept as `config.until_step_N.yaml`, where N is `step`.
    `run.allow_changed` and `run.allow_other_data` apply to one start only and are not written.
    """
    config = replace(config, run=replace(config.run, allow_changed=[], allow_other_data=False))
    current = folder / CONFIG
    if current.exists() and read_regular(current) != to_yaml(config).encode():
        current.replace(folder / f"{_UNTIL_PREFIX}{step}.yaml")
    save_config(config, current)


def config_path_at(folder: Path, step: int) -> Path | None:
    """Return the file of the configuration under which a run made a step; None: the folder has no such file."""
    older = {}
    for path in folder.glob(f"{_UNTIL_PREFIX}*.yaml"):
        number = path.stem.removeprefix(_UNTIL_PREFIX)
        if number.isdecimal() and int(number) >= step:
            older[int(number)] = path
    current = folder / CONFIG
    return older[min(older)] if older else current if current.is_file() else None
