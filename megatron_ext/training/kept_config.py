"""The configurations that a run's folder keeps: today's, and those that others replaced on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_ext.config.save import save_config, to_yaml
from megatron_ext.config.schema import RunConfig
from megatron_ext.files import read_regular

CONFIG = "config.yaml"
_UNTIL = "config.until_step_"


def keep_config(config: RunConfig, folder: Path, step: int) -> None:
    """Keep the configuration; one that it replaces (another layout, say) stays as the one until this step.

    What was allowed to be changed was allowed for one start, and is not kept.
    """
    config = replace(config, run=replace(config.run, allow_changed=[], allow_other_data=False))
    current = folder / CONFIG
    if current.exists() and read_regular(current) != to_yaml(config).encode():
        current.replace(folder / f"{_UNTIL}{step}.yaml")
    save_config(config, current)


def config_file_at(folder: Path, step: int) -> Path | None:
    """The configuration with which a run did a step, as far as its folder keeps it; None: it keeps none."""
    older = {}
    for path in folder.glob(f"{_UNTIL}*.yaml"):
        number = path.stem.removeprefix(_UNTIL)
        if number.isdecimal() and int(number) >= step:
            older[int(number)] = path
    current = folder / CONFIG
    return older[min(older)] if older else current if current.is_file() else None
