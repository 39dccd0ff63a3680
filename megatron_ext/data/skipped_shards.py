"""Warnings and records of skipped damaged shards (`data.on_damaged: skip`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.verify import Damage
from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

SKIPPED = "skipped_shards.jsonl"


def warnings(damages: Sequence[Damage], samples: TrainingSamples) -> Iterator[str]:
    """Yield a warning for each skipped shard, then one with the total. Yield nothing if no shard is skipped."""
    for damage in damages:
        yield f"selectron: warning: {damage.problem}: skipped ({damage.tokens:,} tokens)"
    if damages:
        remaining = samples.num_windows - samples.lost_windows
        yield (
            f"selectron: warning: data.on_damaged skip: the run skips {_tokens(damages):,} tokens; "
            f"{remaining:,} of {samples.num_windows:,} samples per epoch remain and replace the others"
        )


def record_skipped(folder: Path, damages: Sequence[Damage], samples: TrainingSamples, step: int) -> None:
    """Record the shards that are skipped after a step, if they differ from those of the previous record.

    Args:
        folder: run folder.
        damages: skipped shards.
        samples: training samples of the run, without the skipped shards.
        step: number of completed steps.

    Raises:
        UserError: the file has a line that is not a valid record.
    """
    path = folder / SKIPPED
    lines = read_regular(path).decode().splitlines() if path.exists() else []
    try:
        earlier = [line for line in lines if parse_json(line)["step"] < step]
        previous = parse_json(earlier[-1])["shards"] if earlier else []
    except (ValueError, TypeError, KeyError):
        problem = "has a line that is not a record of skipped shards"
        raise UserError(str(path), problem, "fix the line or remove the file") from None
    record: dict[str, Any] = {
        "step": step,
        "tokens": _tokens(damages),
        "samples_an_epoch": samples.num_windows - samples.lost_windows,
        "of_samples": samples.num_windows,
        "shards": [asdict(damage) for damage in damages],
    }
    if record["shards"] != previous:
        earlier.append(json.dumps(record))
    if earlier != lines:
        write_atomically(path, "".join(f"{line}\n" for line in earlier).encode())


def copy_skipped(source: Path, folder: Path, step: int) -> None:
    """Copy another run's records of skipped shards that precede a checkpoint.

    Args:
        source: folder of the other run.
        folder: run folder.
        step: step of the checkpoint.
    """
    lines = read_regular(source / SKIPPED).decode().splitlines() if (source / SKIPPED).exists() else []
    earlier = [line for line in lines if parse_json(line)["step"] < step]
    if earlier:
        write_atomically(folder / SKIPPED, "".join(f"{line}\n" for line in earlier).encode())


def _tokens(damages: Sequence[Damage]) -> int:
    return sum(damage.tokens for damage in damages)
