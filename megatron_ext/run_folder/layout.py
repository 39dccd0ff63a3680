"""Names of the files and folders in a run folder."""

from __future__ import annotations

import re

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
SUITES = "suites.jsonl"
DECISIONS = "decisions.jsonl"
STRAGGLERS = "stragglers.jsonl"
TENSORBOARD = "tensorboard"
WANDB = "wandb"
"""Files of Weights & Biases, unless WANDB_DIR is set."""
MLFLOW = "mlflow.db"
"""MLflow's database, unless MLFLOW_TRACKING_URI is set."""
MODEL = "model.json"
CHECKPOINTS = "checkpoints"
EVALUATIONS = "evaluation"
"""Results of evaluation suites, a folder per step."""
SWEEP = "sweep.json"
"""File beside the run folders of a sweep: `runs`, their names, and `chosen`, the fields that are chosen by a loss."""

_STEP_NAME = re.compile(r"step_([0-9]{1,18})")


def step_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint or evaluation results."""
    return f"step_{step}"


def tracker_file_name(service: str) -> str:
    """Return the name of the file with the run's identifier at a tracking service (`wandb`, `mlflow`, `trackio`)."""
    return f"tracked_{service}.json"


def parse_step_name(name: str) -> int | None:
    """Return the step of a folder's name, or None if the name is not of the form of `step_name`."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None
