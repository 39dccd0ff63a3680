"""A trained run that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import whole_run
from corpora import prepared
from launching import TP2, write_config

RUN = [
    *TP2,
    "model.pattern=top1_chunk,gated_deltanet,attention,mamba",
    "mixers.attention.position_encoding=learned",
    "model.init_std=0.3",  # large, so that the likeliest token is clear
    "training.steps=4",
    "optimizer.lr=0.05",  # large, so that another step generates another text
]


@pytest.fixture(scope="session")
def run(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with checkpoints of steps 2 and 4 and a position table for 64 tokens."""
    folder = tmp_path_factory.mktemp("generated")
    data = prepared(folder, documents=60)
    pool.run(whole_run.run, 2, write_config(folder, data, folder), [*RUN, "training.checkpoint_every=2"])
    return folder / "run"
