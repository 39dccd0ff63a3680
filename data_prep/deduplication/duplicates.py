"""Exact and near-duplicates, as stages for datatrove's executors.

Near-duplicates are found by MinHash as in Lee et al. 2022 (arXiv 2107.06499). The set of a document's word n-grams
gives `buckets` signatures of `hashes_per_bucket` minima each. Two documents that share a signature are near-duplicates.
Documents of Jaccard similarity s share a signature with probability 1 - (1 - s**hashes_per_bucket)**buckets. Exact
duplicates have equal text. They use the same stages with a single signature, a 120-bit hash of the whole text.

Reading, sorted signature files and the search for equal signatures are datatrove's. The module `survivors` chooses the
document to keep, because datatrove's own choice ignores splits and depends on the number of tasks. No text is written
between stages. Each stage reads the documents again, so `documents` must yield the same documents every time.
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
from data_prep.ledger import DropCounter, Ledger
from data_prep.running.execution import Stage
from data_prep.running.workers import allow_open_files
from megatron_ext.utils.errors import UserError

EXACT_CONFIG = MinhashConfig(num_buckets=1, hashes_per_bucket=2)
MAX_FILE_LINES = 1024
"""Maximum number of signatures read at once from each task's file; datatrove's default of 5 causes many small reads."""

MAX_BUFFERED_LINES = 1 << 20
"""Maximum number of signatures in memory from the files of all tasks, which are open together: 71 MB by default."""


@dataclass(frozen=True, kw_only=True)
class NearOptions:
    """Options of near-duplicate detection.

    Attributes:
        ngram_words: words per n-gram.
        buckets: signatures per document; with more signatures, less similar documents are also found.
        hashes_per_bucket: minima per signature; with more minima, only more similar documents are found.
        seed: seed of the hash permutations.
    """

    ngram_words: int = 5
    buckets: int = 14
    hashes_per_bucket: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        """Check that all options except the seed are positive.

        Raises:
            UserError: an option is below 1.
        """
        for name in ("ngram_words", "buckets", "hashes_per_bucket"):
            if getattr(self, name) < 1:
                option = f"--near-{name.replace('_', '-')}"
                raise UserError(option, f"{getattr(self, name)} is not positive", "give 1 or more")

    def detection_probability(self, similarity: float) -> float:
        """Return the probability that two documents with a Jaccard similarity in [0, 1] are found."""
        return 1 - (1 - similarity**self.hashes_per_bucket) ** self.buckets

    def config(self) -> MinhashConfig:
        """Return the options in datatrove's format."""
        return MinhashConfig(
            n_grams=self.ngram_words,
            num_buckets=self.buckets,
            hashes_per_bucket=self.hashes_per_bucket,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Deduplication:
    """Stages that find duplicates, and the steps that read the remaining documents.

    Attributes:
        stages: stages to run in order.
        documents: steps that read the documents without duplicates, to which the caller appends further steps. They
            must run in as many tasks as the first stage.
    """

    stages: list[Stage]
    documents: list[PipelineStep]


def exact_duplicates(
    documents: list[PipelineStep],
    folder: str,
    tasks: int,
    *,
    extra_steps: Sequence[PipelineStep] = (),
    ledger: Ledger | None = None,
) -> Deduplication:
    """Find documents with equal text.

    Args:
        documents: steps that read and clean documents. Document ids are unique. `metadata["split"]` is train,
            validation or test.
        folder: folder for signatures and results, about 30 bytes per document; local or an fsspec URL. The choice of
            survivors temporarily takes another 56 bytes for each signature that a document shares with another.
        tasks: number of reading tasks.
        extra_steps: steps to run in the same pass over all documents, including duplicates. They yield every document.
        ledger: receives the counts of dropped documents.
    """
    signature = ExactSignature(f"{folder}/signatures", EXACT_CONFIG)
    return _deduplication("exact", documents, folder, tasks, signature, extra_steps, ledger or Ledger())


def near_duplicates(
    documents: list[PipelineStep],
    folder: str,
    tasks: int,
    options: NearOptions | None = None,
    ledger: Ledger | None = None,
) -> Deduplication:
    """Find documents with nearly equal text; texts shorter than an n-gram are never near-duplicates.

    Args:
        documents: see `exact_duplicates`; pass its `documents` to remove exact duplicates first.
        folder: folder for signatures and results, 960 bytes per document with the defaults; local or an fsspec URL.
        tasks: number of reading tasks.
        options: options of near-duplicate detection; None: the defaults.
        ledger: receives the counts of dropped documents.
    """
    signature = NearSignature(f"{folder}/signatures", (options or NearOptions()).config())
    return _deduplication("near", documents, folder, tasks, signature, (), ledger or Ledger())


def _deduplication(
    name: str,
    documents: list[PipelineStep],
    folder: str,
    tasks: int,
    signature: BoundedSignature,
    extra_steps: Sequence[PipelineStep],
    ledger: Ledger,
) -> Deduplication:
    keys, pairs, removed = (f"{folder}/{part}" for part in ("keys", "pairs", "removed"))
    lines = max(1, min(MAX_FILE_LINES, MAX_BUFFERED_LINES // tasks))
    buckets = _Buckets(tasks, f"{folder}/signatures", pairs, config=signature.config, lines_to_buffer=lines)
    stages = [
        Stage(f"{name}_signatures", [*documents, *extra_steps, WriteKeys(keys), signature], tasks),
        Stage(f"{name}_pairs", [buckets], signature.config.num_buckets),
        Stage(f"{name}_survivors", [ChooseSurvivors(pairs, keys, removed, tasks)], 1),
    ]
    counter = DropCounter(ledger, f"{name} duplicate")
    return Deduplication(stages, [*documents, KeepSurvivors(keys, removed, counter)])


class _Buckets(MinhashDedupBuckets):
    """datatrove's bucket step, which opens the signature files of all tasks at once, with a higher limit on open files.

    Args:
        tasks: number of tasks that wrote signatures.
        arguments: arguments of datatrove's step.
    """

    def __init__(self, tasks: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Find the documents that share a signature in this bucket."""
        allow_open_files(self._tasks)
        return super().run(data, rank, world_size)
