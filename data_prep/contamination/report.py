"""Contamination report by domain and for the worst documents, as JSON and Markdown."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep

from data_prep.contamination.arrays import load_json
from data_prep.contamination.findings import SUMMARY, names_file
from data_prep.contamination.overlap import OverlapOptions, judgements_file
from data_prep.contamination.runs import RUNS, merge_runs
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.markdown import table

REPORT = "report.json"
TABLE = "report.md"
BANNED = "banned.npy"
DOMAIN_COLUMNS = (
    "split",
    "domain",
    "documents",
    "short",
    "with overlap",
    "n-grams",
    "n-grams in train",
    "contaminated",
    "dropped",
)
WORST_COLUMNS = ("split", "domain", "document", "in train", "longest overlap", "example", "first in train")


class WriteReport(PipelineStep):
    """Step that merges the judgements of all tasks into the report, and writes the n-grams for `DropContaminated`.

    The step runs in one task. It keeps the counts of each domain and its worst documents in memory.

    Args:
        judged: folder of the judgements.
        found: folder of the findings in train.
        folder: output folder.
        tasks: number of judging tasks.
        options: options of the other steps.
    """

    type = "DECONTAMINATION"
    name = "report"

    def __init__(self, judged: str, found: str, folder: str, tasks: int, options: OverlapOptions) -> None:
        super().__init__()
        self.judged = get_datafolder(judged)
        self.found = get_datafolder(found)
        self.folder = get_datafolder(folder)
        self.tasks = tasks
        self.options = options

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write `report.json` last: its presence shows that all other files are complete."""
        domains: dict[tuple[str, str], Counter[str]] = {}
        worst: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for record in (record for task in range(self.tasks) for record in read_judgements(self.judged, task)):
            key = record["split"], record["domain"]
            domains.setdefault(key, Counter()).update(_counts(record, self.options))
            if record["ngrams_in_train"]:
                worst[key] = _worst([*worst.get(key, []), record], self.options.worst)
        merge_runs(self.judged, RUNS, self.tasks, self.folder, BANNED)
        report = {
            "options": asdict(self.options),
            "train": load_json(self.found, SUMMARY),
            "domains": [_domain_entry(*key, domains[key]) for key in sorted(domains)],
            "worst": self._add_names([record for key in sorted(worst) for record in worst[key]]),
        }
        with self.folder.open(TABLE, "wt", encoding="utf-8") as file:
            file.write(format_markdown(report))
        with self.folder.open(REPORT, "wt", encoding="utf-8") as file:
            json.dump(report, file, indent=1, ensure_ascii=False)
        self.stat_update("contaminated", value=sum(counts["contaminated"] for counts in domains.values()))

    def _add_names(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the task and code of the training document in each record by the document's source and id."""
        document_codes = {tuple(record["train_document"]) for record in records}
        names: dict[tuple[int, int], dict[str, str]] = {}
        for task in sorted({task for task, _ in document_codes}):
            with self.found.open(names_file(task), "rt", encoding="utf-8") as file:
                for code, source, name in map(parse_json, file):
                    if (task, code) in document_codes:
                        names[task, code] = {"train_source": source, "train_id": name}
        return [record | names[*record.pop("train_document")] for record in records]


def read_judgements(folder: DataFolder, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the records that `JudgeDocuments` wrote for a task's test documents, in order.

    Raises:
        UserError: there is no file of this task.
    """
    name = judgements_file(rank)
    if not folder.isfile(name):
        raise UserError(
            f"{folder.path}/{name}", "is missing", "judge the test documents first, with the same number of tasks"
        )
    with folder.open(name, "rt", encoding="utf-8") as file:
        yield from map(parse_json, file)


def _counts(record: dict[str, Any], options: OverlapOptions) -> dict[str, int]:
    return {
        "documents": 1,
        "short": int(record["ngrams"] == 0),
        "with_overlap": int(record["ngrams_in_train"] > 0),
        "ngrams": record["ngrams"],
        "ngrams_in_train": record["ngrams_in_train"],
        "contaminated": int(record["contaminated"]),
        "dropped": int(record["contaminated"] and options.action == "drop_test"),
    }


def _worst(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return heapq.nsmallest(count, records, key=lambda record: (-record["share"], -record["ngrams"], record["id"]))


def _domain_entry(split: str, domain: str, counts: Counter[str]) -> dict[str, Any]:
    share = counts["ngrams_in_train"] / counts["ngrams"] if counts["ngrams"] else None
    return {"split": split, "domain": domain, **counts, "share": share}


def format_markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown with two tables.

    Args:
        report: the content of `report.json`.
    """
    options, train = report["options"], report["train"]
    domains = [
        [
            *(entry["split"], entry["domain"], str(entry["documents"]), str(entry["short"])),
            *(str(entry["with_overlap"]), str(entry["ngrams"])),
            "" if entry["share"] is None else f"{entry['ngrams_in_train']} ({entry['share']:.2%})",
            *(str(entry["contaminated"]), str(entry["dropped"])),
        ]
        for entry in report["domains"]
    ]
    worst = [
        [
            *(record["split"], record["domain"], record["id"], f"{record['share']:.2%} of {record['ngrams']}"),
            *(f"{record['longest_overlap_words']} words", record["example"], record["train_id"]),
        ]
        for record in report["worst"]
    ]
    lines = [
        "# Test text found in training text",
        "",
        f"N-grams of {options['ngram_words']} words, in lower case and without punctuation. {train['overlapping']} of "
        f"{train['documents']} training documents contain at least one of them. Short documents have fewer than "
        f"{options['ngram_words']} words and cannot be judged. Contaminated documents have more than "
        f"{options['threshold']:.0%} of their n-grams in train. {_describe_action(options['action'])}",
        "",
        *table(DOMAIN_COLUMNS, domains),
    ]
    if worst:
        lines += ["", "The worst documents of each domain:", "", *table(WORST_COLUMNS, worst)]
    return "\n".join(lines) + "\n"


def _describe_action(action: str) -> str:
    return {
        "report": "Nothing is dropped.",
        "drop_test": "Contaminated documents are dropped.",
        "drop_train": "Training documents that contain an n-gram of a contaminated document are dropped, and counted "
        "in the summary of the preparation.",
    }[action]
