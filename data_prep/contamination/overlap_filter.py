"""datatrove filter that acts on the contamination report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from data_prep.contamination.arrays import load_array, load_json
from data_prep.contamination.ngrams import Hashes, split_words, window_hashes
from data_prep.contamination.overlap import TRAIN, OverlapOptions, find_indices
from data_prep.contamination.report import BANNED, REPORT, read_judgements
from data_prep.ledger import DropCounter
from megatron_ext.utils.errors import UserError


class DropContaminated(BaseFilter):
    """Filter that drops contaminated test documents, or training documents with their n-grams, depending on the action.

    The judgements are read in the order of the documents. These must be the documents that were judged, in as many
    tasks. Memory does not grow with their number. The step's statistics are `dropped_contaminated_<split>_<domain>`.

    Args:
        folder: folder of the report.
        judged: folder of the judgements.
        options: options with which the report was made.
        exclusion_writer: writes the dropped documents, or counts them.
    """

    name = "drop contaminated"

    def __init__(
        self,
        folder: str,
        judged: str,
        options: OverlapOptions,
        exclusion_writer: DiskWriter | DropCounter | None = None,
    ) -> None:
        super().__init__(exclusion_writer)
        self.folder = get_datafolder(folder)
        self.judged = get_datafolder(judged)
        self.options = options
        self._judgements: Iterator[dict[str, Any]] = iter(())
        self._banned: Hashes = np.empty(0, np.uint64)

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that are kept.

        Raises:
            UserError: there is no report, or it was made with other options or documents.
        """
        self._check_report()
        if self.options.action == "drop_test":
            self._judgements = read_judgements(self.judged, rank)
        if self.options.action == "drop_train":
            self._banned = load_array(self.folder, BANNED)
        yield from super().run(data, rank, world_size)
        if next(self._judgements, None) is not None:
            raise self._changed_error("the end")

    def _check_report(self) -> None:
        where = f"{self.folder.path}/{REPORT}"
        if not self.folder.isfile(REPORT):
            raise UserError(where, "is missing", "run the stages that write it first")
        options = asdict(self.options)
        for name, value in load_json(self.folder, REPORT)["options"].items():
            expected = list(options[name]) if isinstance(options[name], tuple) else options[name]
            if value != expected:
                problem = f"was made with {name} {value}, not {expected}"
                raise UserError(where, problem, "remove the folder and start again")

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True to keep a document, or False and the reason for dropping it."""
        split = doc.metadata["split"]
        if split in self.options.splits:
            drop = self.options.action == "drop_test" and self._is_contaminated(doc)
        else:
            drop = split == TRAIN and len(self._banned) > 0 and self._has_banned_gram(doc)
        return (False, f"contaminated_{split}_{doc.metadata['domain']}") if drop else True

    def _is_contaminated(self, doc: Document) -> bool:
        record = next(self._judgements, None)
        if record is None or record["id"] != doc.id:
            raise self._changed_error(doc.id)
        return bool(record["contaminated"])

    def _changed_error(self, location: str) -> UserError:
        problem = f"the test documents differ from those that were judged, starting at {location}"
        return UserError(str(self.judged.path), problem, "remove the folder and start again")

    def _has_banned_gram(self, doc: Document) -> bool:
        hashes = window_hashes(split_words(doc.text), self.options.ngram_words)
        return len(find_indices(self._banned, hashes)) > 0
