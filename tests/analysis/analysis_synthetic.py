"""Run folders whose curves have a closed form, and patches that make fits and pictures of them fast."""

import json
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from megatron_ext.analysis.scaling import law
from megatron_ext.analysis.style import Picture

TOKENS_A_STEP = 4096


@dataclass
class Synthetic:
    """A run to write: its losses are functions of the step and of the noise-free training loss.

    `gap` is added to the test loss of every token. `hardness` is the standard deviation of a document's offset in nats
    per token, which all runs with the same `corpus_seed` share. `wobble` is that of an offset in this run alone.
    """

    name: str = "attention"
    pattern: str = "attention*4"
    mixers: dict = field(default_factory=dict)
    seed: int = 1
    steps: int = 200
    every: int = 20
    gap: float = 0.0
    noise: float = 0.0
    hardness: float = 0.5
    wobble: float = 0.0
    speed: float = 1.0
    documents: dict = field(default_factory=lambda: {"web": 40, "code": 30, "maths": 20})
    corpus_seed: int = 7
    config: dict = field(default_factory=dict)
    size: dict | None = None
    training_loss: Callable | None = None

    def curve(self, step):
        if self.training_loss is not None:
            return self.training_loss(step)
        return 2.5 + 4.0 * np.exp(-self.speed * np.asarray(step) / 80.0)

    def test_loss(self, training_loss):
        return 1.3 * training_loss + self.gap


def split_of(domain):
    return "validation" if domain == "web" else "test"


def write_run(folder: Path, run: Synthetic) -> Path:
    folder.mkdir(parents=True, exist_ok=False)
    config = {
        "data": {"path": "data", "train_domains": ["web"], "seq_length": 512},
        "model": {"pattern": run.pattern, "hidden_size": 64},
        "mixers": run.mixers,
        "training": {"steps": run.steps, "seed": run.seed},
        "run": {"name": run.name},
    }
    for section, values in run.config.items():
        config.setdefault(section, {}).update(values)
    with (folder / "config.yaml").open("w") as stream:
        YAML(typ="safe").dump(config, stream)
    if run.size is not None:
        (folder / "model.json").write_text(json.dumps(run.size))
    generator = np.random.default_rng(run.seed)
    steps = np.arange(1, run.steps + 1)
    losses = run.curve(steps) + run.noise * generator.standard_normal(run.steps)
    (folder / "metrics.jsonl").write_text("".join(step_line(s, loss) for s, loss in zip(steps, losses, strict=True)))
    (folder / "evaluation.jsonl").write_text("".join(evaluation_lines(run)))
    return folder


def step_line(step, loss):
    record = {"step": int(step), "tokens": int(step) * TOKENS_A_STEP, "loss": float(loss), "grad_norm": 1.0}
    record |= {"lr": 1e-3, "tokens_per_second": 5000.0 + step % 3, "mfu": None, "peak_memory": 1 << 30}
    return json.dumps(record) + "\n"


def evaluation_lines(run: Synthetic):
    """Yield test and validation losses on the noise-free curve, averaged over the same window as the training loss."""
    own = np.random.default_rng(1000 + run.seed + 17 * len(run.pattern))
    corpus = np.random.default_rng(run.corpus_seed)
    tokens = {name: corpus.integers(100, 1500, count) for name, count in run.documents.items()}
    hard = {name: run.hardness * corpus.standard_normal(count) for name, count in run.documents.items()}
    extra = {name: run.wobble * own.standard_normal(count) for name, count in run.documents.items()}
    window = min(run.every, 20)
    for step in range(run.every, run.steps + 1, run.every):
        x = float(np.mean(run.curve(np.arange(step - window + 1, step + 1))))
        for name, count in tokens.items():
            base = x if split_of(name) == "validation" else run.test_loss(x)
            nats = (base + hard[name] + extra[name]) * count
            record = {"step": step, "tokens": step * TOKENS_A_STEP, "domain": name, "split": split_of(name)}
            record |= {"loss": float(nats.sum() / count.sum()), "num_tokens": int(count.sum())}
            record |= {"documents": list(range(len(count))), "document_loss": nats.tolist()}
            yield json.dumps(record | {"document_tokens": count.tolist()}) + "\n"


def replace_drawing(
    patch: pytest.MonkeyPatch, replace: Callable[[Any], Callable[..., bytes]], names: Container[str] | None = None
) -> None:
    """Replace `draw` of every picture, or of those with these names, by `replace(draw)` until `patch` is undone."""
    initialize = Picture.__post_init__

    def initialize_and_replace(picture: Picture) -> None:
        initialize(picture)
        if names is None or picture.name in names:
            object.__setattr__(picture, "draw", replace(picture.draw))

    patch.setattr(Picture, "__post_init__", initialize_and_replace)


@contextmanager
def start_near_one_half() -> Iterator[None]:
    """Context manager in which fits start near the exponents of most laws here, instead of at many places."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("alpha", "beta"):
            patch.setitem(law.STARTS, name, np.array([0.5]))
        yield
