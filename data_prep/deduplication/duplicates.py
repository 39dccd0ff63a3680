"""Exact and near-duplicates: which documents are compared how, as stages for datatrove's executors.

Near-duplicates are found by MinHash as in Lee et al. 2022 (arXiv 2107.06499): the set of a document's word n-grams is
put into `buckets` signatures of `hashes_per_bucket` minima each, and two documents that share one signature are near-
duplicates: a chance of 1 - (1 - s**hashes_per_bucket)**buckets at Jaccard similarity s. Exact duplicates are those with
equal text: they go through the same blocks with one signature, 120 bits of hash of the whole text.

Reading, signatures in sorted files and the search for equal ones are datatrove's blocks. Which one of them stays is
said here and in `survivors`, because datatrove's own choice knows no splits, and depends on the number of tasks.
No text is written between stages: each reads the documents again, so `documents` must give the same ones every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets

from data_prep.deduplication.keys import WriteKeys
from data_prep.deduplication.signatures import BoundedSignature, ExactSignature, NearSignature
from data_prep.deduplication.survivors import ChooseSurvivors, KeepSurvivors
from data_prep.ledger import CountLeftOut, Ledger
from data_prep.running.execution import Stage
from data_prep.running.workers import allow_open_files
from megatron_ext.errors import UserError

EXACT = MinhashConfig(num_buckets=1, hashes_per_bucket=2)
LINES_AT_A_TIME = 1024
"""Signatures read at a time from each task's file, at most; datatrove's 5 make many small reads."""

LINES_IN_MEMORY = 1 << 20
"""Signatures read at a time from all tasks' files together, which are open at once: 71 MB at the usual numbers."""


@dataclass(frozen=True, kw_only=True)
class NearOptions:
    """How near two documents must be to count as one.

    Attributes:
        ngram_words: words an n-gram.
        buckets: signatures a document; more find less similar ones.
        hashes_per_bucket: minima a signature; more spare less similar ones.
        seed: of the permutations.
    """

    ngram_words: int = 5
    buckets: int = 14
    hashes_per_bucket: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what is not positive.

        Raises:
            UserError: a number is below 1.
        """
        for name in ("ngram_words", "buckets", "hashes_per_bucket"):
            if getattr(self, name) < 1:
                option = f"--near-{name.replace('_', '-')}"
                raise UserError(option, f"{getattr(self, name)} is not positive", "give 1 or more")

    def chance(self, similarity: float) -> float:
        """Chance that two documents of this Jaccard similarity, 0 to 1, are found."""
        return 1 - (1 - similarity**self.hashes_per_bucket) ** self.buckets

    def config(self) -> MinhashConfig:
        """The same for datatrove."""
        return MinhashConfig(
            n_grams=self.ngram_words,
            num_buckets=self.buckets,
            hashes_per_bucket=self.hashes_per_bucket,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Deduplication:
    """Stages that find duplicates, and what to read after them.

    Attributes:
        stages: to run one after the other.
        documents: steps that read the documents and leave duplicates out; what follows is put behind them, in as many
            tasks as the stages were made for.
    """

    stages: list[Stage]
    documents: list[PipelineStep]


def exact_duplicates(
    documents: list[PipelineStep],
    folder: str,
    tasks: int,
    *,
    beside: Sequence[PipelineStep] = (),
    ledger: Ledger | None = None,
) -> Deduplication:
    """Find documents with equal text.

    Args:
        documents: steps that read and clean; `metadata["split"]` is train, validation or test, and ids differ.
        folder: for signatures and results, about 30 bytes a document; local or an fsspec URL. While it is chosen which
            documents go, 56 bytes more for each that has a duplicate, and for each signature that it shares.
        tasks: number of tasks that read.
        beside: steps that share the pass over the documents, duplicates among them, and pass all of them on.
        ledger: told of the documents that are left out.
    """
    signature = ExactSignature(f"{folder}/signatures", EXACT)
    return _deduplication("exact", documents, folder, tasks, signature, beside, ledger or Ledger())


def near_duplicates(
    documents: list[PipelineStep],
    folder: str,
    tasks: int,
    options: NearOptions | None = None,
    ledger: Ledger | None = None,
) -> Deduplication:
    """Find documents with nearly equal text; texts shorter than an n-gram are never any.

    Args:
        documents: see `exact_duplicates`; give its `documents` to leave out exact duplicates first.
        folder: for signatures and results, 960 bytes a document at the usual numbers; local or an fsspec URL.
        tasks: number of tasks that read.
        options: how near.
        ledger: told of the documents that are left out.
    """
    signature = NearSignature(f"{folder}/signatures", (options or NearOptions()).config())
    return _deduplication("near", documents, folder, tasks, signature, (), ledger or Ledger())


def _deduplication(
    name: str,
    documents: list[PipelineStep],
    folder: str,
    tasks: int,
    signature: BoundedSignature,
    beside: Sequence[PipelineStep],
    ledger: Ledger,
) -> Deduplication:
    keys, pairs, removed = (f"{folder}/{part}" for part in ("keys", "pairs", "removed"))
    lines = max(1, min(LINES_AT_A_TIME, LINES_IN_MEMORY // tasks))
    buckets = _Buckets(tasks, f"{folder}/signatures", pairs, config=signature.config, lines_to_buffer=lines)
    stages = [
        Stage(f"{name}_signatures", [*documents, *beside, WriteKeys(keys), signature], tasks),
        Stage(f"{name}_pairs", [buckets], signature.config.num_buckets),
        Stage(f"{name}_survivors", [ChooseSurvivors(pairs, keys, removed, tasks)], 1),
    ]
    counting = CountLeftOut(ledger, f"{name} duplicate")
    return Deduplication(stages, [*documents, KeepSurvivors(keys, removed, counting)])


class _Buckets(MinhashDedupBuckets):
    """datatrove's, which opens the signatures of all tasks at once.

    Args:
        tasks: that wrote signatures.
        arguments: datatrove's.
    """

    def __init__(self, tasks: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Find the documents that share a bucket of their signatures."""
        allow_open_files(self._tasks)
        return super().run(data, rank, world_size)
