"""Final summary of `selectron prepare`: the output, the dropped documents, and the contamination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.manifest import CountEntry, Manifest, match_domain
from data_prep.output.merging import CONTAMINATION, CONTAMINATION_TABLE
from megatron_ext.utils.atomic_files import read_regular
from megatron_ext.utils.json_text import parse_json

CHANGE_DESCRIPTIONS = {
    "unicode": "converted to one Unicode form",
    "line_ends": "line endings converted to LF",
    "nul": "NUL characters removed",
    "controls": "control characters removed",
    "special_tokens": "special tokens of --source-tokenizer removed",
    "parted": "split at end-of-document tokens",
}

DROP_DESCRIPTIONS = {
    "empty": "only whitespace after cleaning",
    "nul": "with a NUL character",
    "exact duplicate": "exact duplicates",
    "near duplicate": "near-duplicates",
    "contaminated": "contaminated",
}

MAX_UNUSED_LINES = 20
"""Maximum number of lines for unused domains. All further domains are counted in one line."""


def format_summary(manifest: Manifest, output: str) -> str:
    """Return a table of the splits and domains, and lines about the documents that are in no split.

    Args:
        manifest: manifest of the folder.
        output: the folder, which may contain a contamination report.
    """
    lines = [f"{'split':<12}{'domain':<20}{'documents':>12}{'tokens':>16}{'bytes':>16}"]
    for entry in manifest.domains:
        lines.append(f"{entry.split:<12}{entry.domain:<20}{entry.documents:>12}{entry.tokens:>16}{entry.bytes:>16}")
    lines += _format_absent(manifest)
    if not any(entry.split == "validation" for entry in manifest.domains):
        lines.append("the validation split is empty; increase --validation-fraction to hold out documents")
    lines += _format_counts("cleaned", manifest.cleaned, CHANGE_DESCRIPTIONS)
    if not manifest.duplicates and manifest.options.get("duplicates") in ("exact", "near"):
        lines.append("no duplicates were found")
    lines += _format_counts("dropped", manifest.left_out, DROP_DESCRIPTIONS)
    lines += _format_unused(manifest)
    lines += [f"skipped: {entry.records} in {entry.file}: {entry.reason}" for entry in manifest.skipped]
    lines += [_format_unread(kind) for kind in manifest.provenance.get("not_read", [])]
    return "\n".join([*lines, *_contamination_lines(Path(output)), f"written: {output}"])


def _format_counts(action: str, entries: list[CountEntry], descriptions: dict[str, str]) -> list[str]:
    return [f"{action}: {entry.documents} in {entry.split}: {descriptions[entry.reason]}" for entry in entries]


def _format_absent(manifest: Manifest) -> list[str]:
    """Report default domains without a document. A domain that was requested explicitly would have been an error."""
    absent = [
        name
        for option, split in (("train_domains", "train"), ("test_domains", "test"))
        for name in manifest.options.get(option, [])
        if match_domain(name, manifest.domain_names(split)) is None
    ]
    return [f"no documents in: {', '.join(absent)}"] if absent else []


def _format_unused(manifest: Manifest) -> list[str]:
    """Report documents that no split uses, most frequent first."""
    entries = sorted(manifest.unused, key=lambda entry: -entry.documents)
    lines = [f"not used: {entry.documents} of {entry.domain} ({entry.reason})" for entry in entries[:MAX_UNUSED_LINES]]
    remaining = entries[MAX_UNUSED_LINES:]
    if remaining:
        documents = sum(entry.documents for entry in remaining)
        lines.append(f"not used: {documents} of {len(remaining)} more domains, which the manifest lists")
    return lines


def _format_unread(kind: dict[str, Any]) -> str:
    """Report unread files of one suffix, with a few names."""
    files = f"{kind['files']} {kind['suffix']} file{'s' if kind['files'] > 1 else ''}".replace("  ", " ")
    prefix = "for example " if kind["files"] > len(kind["examples"]) else ""
    suffix = "" if kind["suffix"] else " without suffix"
    return f"not read: {files}{suffix} ({kind['reason']}): {prefix}{', '.join(kind['examples'])}"


def _contamination_lines(root: Path) -> list[str]:
    path = root / CONTAMINATION
    if not path.is_file():
        return []
    report = parse_json(read_regular(path))
    lines = [_format_contamination(entry) for entry in report["domains"]]
    return [*lines, f"contamination: see {root / CONTAMINATION_TABLE}"] if lines else ["contamination: nothing to test"]


def _format_contamination(entry: dict[str, Any]) -> str:
    dropped = f", {entry['dropped']} dropped" if entry["dropped"] else ""
    return (
        f"contamination: {entry['split']} {entry['domain']}: {entry['documents']} documents tested, "
        f"{entry['contaminated']} contaminated{dropped}, {entry['short']} too short to judge"
    )
