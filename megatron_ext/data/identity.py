"""Record of a run's data, stored in checkpoints, `model.json` and other files of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from data_prep.digest import DomainText, digest, domain_texts, text_digest
from data_prep.manifest import Manifest
from megatron_ext.data.blend import shares

ORDER = 1
"""Version of the sample order (see `data.order`). Runs of the same text in different orders have different records."""


def data_record(
    manifest: Manifest,
    train_domains: Sequence[str],
    test_domains: Sequence[str],
    *,
    seq_length: int,
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Describe the training and evaluation data as plain values.

    Args:
        manifest: manifest of the data.
        train_domains: training domains, by the manifest's names. Their validation text is part of the evaluation text.
        test_domains: test domains, by the manifest's names.
        seq_length: tokens per sample.
        seed: seed of the sample order.
        weights: weights of the training domains, in any unit. None: domains are sampled in proportion to their tokens.

    Returns:
        Dictionary with these keys:
        train: digest of the training text.
        order: digest of the training text and of the order in which the run reads it.
        evaluation: digest of the evaluation text.
        tokenizer: sha256 of the tokenizer file.
        texts: contents of each domain, see `DomainText`.
    """
    train = domain_texts(manifest, "train", train_domains)
    validation = _existing_texts(manifest, "validation", train_domains)
    evaluated = [*validation, *_existing_texts(manifest, "test", test_domains)]
    parts = None if weights is None else shares([weights[text.domain] for text in train])
    train_digest = text_digest(train)
    return {
        "train": train_digest,
        "order": digest([train_digest, seq_length, seed, parts, ORDER]),
        "evaluation": text_digest(evaluated),
        "tokenizer": manifest.tokenizer.sha256,
        "texts": [asdict(text) for text in (*train, *evaluated)],
    }


def _existing_texts(manifest: Manifest, split: str, domains: Iterable[str]) -> list[DomainText]:
    names = set(manifest.domain_names(split))
    return domain_texts(manifest, split, [name for name in domains if name in names])


def describe_differences(before: Mapping[str, Any], after: Mapping[str, Any], *splits: str) -> list[str]:
    """Describe the differences between the texts of two records, with one phrase per domain.

    Args:
        before: earlier record, from `data_record`.
        after: later record, from `data_record`.
        splits: splits to compare: train, validation or test.
    """
    old, new = (
        {(text["split"], text["domain"]): text for text in record.get("texts", ()) if text["split"] in splits}
        for record in (before, after)
    )
    phrases = []
    for key in dict.fromkeys(chain(new, old)):
        name = f"{key[1]} ({key[0]})"
        if key not in old:
            phrases.append(f"{name} is new")
        elif key not in new:
            phrases.append(f"{name} is missing")
        elif old[key] != new[key]:
            new_counts, old_counts = (
                f"{text['documents']:,} documents, {text['tokens']:,} tokens" for text in (new[key], old[key])
            )
            description = f"{new_counts} (previously {old_counts})"
            if new_counts == old_counts:
                description = "the same number of documents and tokens, but different shards"
            phrases.append(f"{name} has {description}")
    return phrases
