"""Merge of the tasks' results into one prepared folder: shards in the order of the tasks, and the manifest."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from data_prep.contamination.report import REPORT, TABLE
from data_prep.ledger import count_unused
from data_prep.manifest import (
    VERSION,
    CountEntry,
    DomainEntry,
    Manifest,
    ShardEntry,
    SkippedEntry,
    TokenizerEntry,
    save_manifest,
)
from data_prep.output.writing import TaskResult, count_entries, load_result, manifest_order, unused_entries
from data_prep.splits import SplitPlan
from data_prep.storage import publish
from data_prep.tokenization.vocabularies import token_dtype
from megatron_ext.utils.errors import UserError

CONTAMINATION, CONTAMINATION_TABLE = "contamination.json", "contamination.md"
"""Files of the contamination report in a prepared folder."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Merge of the tasks' results, with all further data of the manifest.

    Attributes:
        root: folder of the manifest.
        tasks_folder: output folder of the tasks.
        tasks: number of tasks.
        plan: split plan, which determines the domains that must have documents.
        tokenizer: the tokenizer of the data.
        report: folder of the contamination report; None if there is none.
        options: options for the manifest.
        provenance: provenance for the manifest.
    """

    root: Path
    tasks_folder: Path
    tasks: int
    plan: SplitPlan
    tokenizer: TokenizerEntry
    report: Path | None
    options: dict[str, Any]
    provenance: dict[str, Any]

    def run(self) -> Manifest:
        """Move the shards to their final paths and write the manifest. An interrupted merge can be rerun.

        Raises:
            UserError: a requested domain has no document.
        """
        results = [load_result(self.tasks_folder / f"{task:05d}.json") for task in range(self.tasks)]
        _check_domains(self.plan, results)
        skipped: Counter[tuple[str, str]] = Counter()
        for entry in (entry for result in results for entry in result.skipped):
            skipped[entry.file, entry.reason] += entry.records
        unused: Counter[tuple[str, str]] = Counter()
        for unused_entry in (entry for result in results for entry in result.unused):
            count_unused(unused, unused_entry.domain, unused_entry.reason, unused_entry.documents)
        left_out = _sum_counts(entry for result in results for entry in result.left_out)
        if self.report is not None:
            shutil.copyfile(self.report / REPORT, self.root / CONTAMINATION)
            shutil.copyfile(self.report / TABLE, self.root / CONTAMINATION_TABLE)
        manifest = Manifest(
            version=VERSION,
            tokenizer=self.tokenizer,
            dtype=token_dtype(self.tokenizer.vocab_size),
            domains=self._domains(results),
            skipped=[SkippedEntry(*key, number) for key, number in sorted(skipped.items())],
            duplicates=sum(entry.documents for entry in left_out if entry.reason.endswith("duplicate")),
            left_out=left_out,
            cleaned=_sum_counts(entry for result in results for entry in result.changed),
            unused=unused_entries(unused),
            options=self.options,
            provenance=self.provenance,
        )
        save_manifest(self.root, manifest)
        return manifest

    def _domains(self, results: list[TaskResult]) -> list[DomainEntry]:
        merged: dict[tuple[str, str], DomainEntry] = {}
        for task, result in enumerate(results):
            for entry in result.domains:
                key = (entry.split, entry.domain)
                merged_entry = merged.get(key) or DomainEntry(*key, 0, 0, 0, 0, [])
                first = len(merged_entry.shards)
                shards = [self._move_shard(task, shard, first + index) for index, shard in enumerate(entry.shards)]
                merged[key] = _add_entry(merged_entry, replace(entry, shards=shards))
        return [merged[key] for key in sorted(merged, key=manifest_order)]

    def _move_shard(self, task: int, shard: ShardEntry, index: int) -> ShardEntry:
        folder = Path(shard.file).parent
        renamed = replace(
            shard,
            file=(folder / f"{index:06d}.tar").as_posix(),
            index=(folder / f"{index:06d}.index.npy").as_posix(),
        )
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        for old, new in ((shard.file, renamed.file), (shard.index, renamed.index)):
            written = self.tasks_folder / f"{task:05d}" / old
            if written.exists():  # otherwise an interrupted merge has moved it
                written.rename(self.root / new)
        return renamed


class FinishStep(PipelineStep):
    """Step that creates the prepared folder. As a separate step, it can be the last Slurm job of a chain.

    Args:
        merging: merge that fills the folder.
        output: final path of the folder.
    """

    type = "WRITER"
    name = "manifest"

    def __init__(self, merging: Merge, output: Path) -> None:
        super().__init__()
        self.merging = merging
        self.output = output

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Merge the results and rename the folder, in a single task."""
        self.merge()
        yield from ()

    def merge(self) -> Manifest:
        """Merge the results of the tasks, and rename the folder to its final path."""
        manifest = self.merging.run()
        publish(self.merging.root, self.output)
        return manifest


def _add_entry(merged_entry: DomainEntry, entry: DomainEntry) -> DomainEntry:
    return replace(
        merged_entry,
        documents=merged_entry.documents + entry.documents,
        tokens=merged_entry.tokens + entry.tokens,
        characters=merged_entry.characters + entry.characters,
        bytes=merged_entry.bytes + entry.bytes,
        shards=[*merged_entry.shards, *entry.shards],
    )


def _sum_counts(entries: Iterable[CountEntry]) -> list[CountEntry]:
    sums: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        sums[entry.split, entry.reason] += entry.documents
    return count_entries(sums)


def _check_domains(plan: SplitPlan, results: list[TaskResult]) -> None:
    written = {(entry.split, entry.domain) for result in results for entry in result.domains}
    for option, split, names in (("--train-domains", "train", plan.train), ("--test-domains", "test", plan.test)):
        for name in sorted(names - plan.optional):
            if (split, name) not in written:
                problem = f"{name} has no document in the {split} split"
                raise UserError(option, problem, "choose another domain or give more documents")
    if not any(split == "train" for split, _ in written):
        raise UserError("--train-domains", "no training document remains", "choose other domains")
