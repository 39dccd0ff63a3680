"""Configurations, identities and records of resumed runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_ext.checkpoint.folder import Progress, Record
from megatron_ext.config.load import resolve
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.validate import validate
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.runs.identity import identity


def text(split: str, domain: str, documents: int = 10, tokens: int = 100, sha256: str = "0") -> dict[str, Any]:
    """Entry of a data record."""
    return {"split": split, "domain": domain, "documents": documents, "tokens": tokens, "sha256": sha256}


DATA_RECORD: dict[str, Any] = {
    "train": "text",
    "order": "order",
    "evaluation": "tests",
    "tokenizer": "a" * 64,
    "texts": [text("train", "A"), text("train", "B"), text("test", "T")],
}


def a_run(fields: dict[str, Any]) -> RunConfig:
    """Complete configuration with a cosine schedule of 10 steps, and overrides by dotted name."""
    tree: dict[str, Any] = {
        "data": {"path": "data", "seq_length": 64},
        "model": {"pattern": "attention*2", "hidden_size": 32, "num_attention_heads": 4},
        "mixers": {},
        "training": {"steps": 10, "global_batch_size": 4},
        "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2},
    }
    for field, value in fields.items():
        *parents, last = field.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return resolve(validate(RunConfig, tree), load_all())


def identity_of(
    config: RunConfig,
    record: dict[str, Any] | None = None,
    train_domains: list[str] | None = None,
    tokenizer: str = "a" * 64,
) -> dict[str, Any]:
    """Identity of the run as its checkpoint records it."""
    manifest = SimpleNamespace(tokenizer=SimpleNamespace(sha256=tokenizer))
    data: Any = SimpleNamespace(
        train_domains=train_domains or ["A", "B"],
        weights=config.data.weights,
        manifest=manifest,
        vocab_size=300,
        record=DATA_RECORD if record is None else record,
    )
    return identity(config, data)


def record_of(identity: dict[str, Any], step: int = 6) -> Record:
    """Record of a checkpoint."""
    return Record(Progress(step, 4 * step, 256 * step), identity, [1, 1], {})
