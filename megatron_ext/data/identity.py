"""What a run was trained on: the record of its data in checkpoints, `model.json` and its other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from data_prep.digest import Text, digest, text_digest, texts_of
from data_prep.manifest import Manifest
from megatron_ext.data.blend import shares

ORDER = 1
"""Version of the order of samples, see `data.order`: another one would make another run of the same text."""


def data_record(
    manifest: Manifest,
    train_domains: Sequence[str],
    test_domains: Sequence[str],
    *,
    seq_length: int,
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """What is trained and evaluated on, as plain values.

    Args:
        manifest: of the data.
        train_domains: trained on, by the manifest's names; their validation text is evaluated on.
        test_domains: tested on, by the manifest's names.
        seq_length: tokens a sample.
        seed: of the samples' order.
        weights: of the training domains, in any unit; None: in proportion to their tokens.

    Returns:
        train: digest of the training text; order: of that and the order in which the run reads it; evaluation: of the
        text that is evaluated on; tokenizer: sha256 of its file; texts: what each domain holds, see `Text`.
    """
    train = texts_of(manifest, "train", train_domains)
    evaluated = [*_there(manifest, "validation", train_domains), *_there(manifest, "test", test_domains)]
    parts = None if weights is None else shares([weights[text.domain] for text in train])
    text = text_digest(train)
    return {
        "train": text,
        "order": digest([text, seq_length, seed, parts, ORDER]),
        "evaluation": text_digest(evaluated),
        "tokenizer": manifest.tokenizer.sha256,
        "texts": [asdict(one) for one in (*train, *evaluated)],
    }


def _there(manifest: Manifest, split: str, domains: Iterable[str]) -> list[Text]:
    names = set(manifest.domain_names(split))
    return texts_of(manifest, split, [name for name in domains if name in names])


def differences(before: Mapping[str, Any], after: Mapping[str, Any], *splits: str) -> list[str]:
    """How the texts of two records differ in some splits, a phrase a domain.

    Args:
        before: see `data_record`.
        after: the same.
        splits: train, validation or test.
    """
    old, new = (
        {(text["split"], text["domain"]): text for text in record.get("texts", ()) if text["split"] in splits}
        for record in (before, after)
    )
    found = []
    for key in dict.fromkeys(chain(new, old)):
        name = f"{key[1]} ({key[0]})"
        if key not in old:
            found.append(f"{name} was not there")
        elif key not in new:
            found.append(f"{name} is missing")
        elif old[key] != new[key]:
            one, other = (
                f"{text['documents']:,} documents, {text['tokens']:,} tokens" for text in (new[key], old[key])
            )
            same = "as many documents and tokens, and other shards"
            found.append(f"{name} has {same if one == other else f'{one}, and had {other}'}")
    return found
