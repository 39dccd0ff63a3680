"""Final summary of `selectron prepare`: the output, the dropped documents, and the contamination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.manifest import Manifest, match_domain
from data_prep.output.merging import CONTAMINATION, CONTAMINATION_TABLE
from megatron_ext.utils.atomic_files import read_regular
from megatron_ext.utils.json_text import parse_json

CHANGES = {
    "unicode": "converted to one Unicode form",
    "line_ends": "line endings converted to LF",
    "nul": "NUL characters removed",
    "controls": "control characters removed",
    "special_tokens": "special tokens of --source-tokenizer removed",
    "parted": "split at end-of-document tokens",
}

LEFT_OUT = {
    "empty": "only whitespace after cleaning",
    "nul": "with a NUL character",
    "exact duplicate": "exact duplicates",
    "near duplicate": "near-duplicates",
    "contaminated": "contaminated",
}

MOST_LINES = 20
"""Maximum number of lines for unused domains. Further domains share one line."""


def summary(manifest: Manifest, output: str) -> str:
    """Return a table of the splits and domains, and lines about the documents that are in no split.

    Args:
        manifest: manifest of the folder.
        output: the folder, which may contain a contamination report.
    """
    lines = [f"{'split':<12}{'domain':<20}{'documents':>12}{'tokens':>16}{'bytes':>16}"]
    for entry in manifest.domains:
        lines.append(f"{entry.split:<12}{entry.domain:<20}{entry.documents:>12}{entry.tokens:>16}{entry.bytes:>16}")
    lines += _absent(manifest)
    if not any(entry.split == "validation" for entry in manifest.domains):
        lines.append("the validation split is empty; increase --validation-fraction to hold out documents")
    lines += [f"cleaned: {one.documents} in {one.split}: {CHANGES[one.reason]}" for one in manifest.cleaned]
    if not manifest.duplicates and manifest.options.get("duplicates") in ("exact", "near"):
        lines.append("no duplicates were found")
    lines += [f"dropped: {one.documents} in {one.split}: {LEFT_OUT[one.reason]}" for one in manifest.left_out]
    lines += _unused(manifest)
    lines += [f"skipped: {one.records} in {one.file}: {one.reason}" for one in manifest.skipped]
    lines += [_of_unread(kind) for kind in manifest.provenance.get("not_read", [])]
    return "\n".join([*lines, *_contamination(Path(output)), f"written: {output}"])


def _absent(manifest: Manifest) -> list[str]:
    """Report default domains without a document. A domain that was requested explicitly would have been an error."""
    absent = [
        name
        for option, split in (("train_domains", "train"), ("test_domains", "test"))
        for name in manifest.options.get(option, [])
        if match_domain(name, manifest.domain_names(split)) is None
    ]
    return [f"no documents in: {', '.join(absent)}"] if absent else []


def _unused(manifest: Manifest) -> list[str]:
    """Report documents that no split uses, most frequent first."""
    entries = sorted(manifest.unused, key=lambda one: -one.documents)
    lines = [f"not used: {one.documents} of {one.domain} ({one.reason})" for one in entries[:MOST_LINES]]
    rest = entries[MOST_LINES:]
    if rest:
        documents = sum(one.documents for one in rest)
        lines.append(f"not used: {documents} of {len(rest)} more domains, which the manifest lists")
    return lines


def _of_unread(kind: dict[str, Any]) -> str:
    """Report unread files of one suffix, with a few names."""
    files = f"{kind['files']} {kind['suffix']} file{'s' if kind['files'] > 1 else ''}".replace("  ", " ")
    such_as = "for example " if kind["files"] > len(kind["examples"]) else ""
    suffix = "" if kind["suffix"] else " without suffix"
    return f"not read: {files}{suffix} ({kind['reason']}): {such_as}{', '.join(kind['examples'])}"


def _contamination(root: Path) -> list[str]:
    path = root / CONTAMINATION
    if not path.is_file():
        return []
    report = parse_json(read_regular(path))
    lines = [_of_domain(entry) for entry in report["domains"]]
    return [*lines, f"contamination: see {root / CONTAMINATION_TABLE}"] if lines else ["contamination: nothing to test"]


def _of_domain(entry: dict[str, Any]) -> str:
    dropped = f", {entry['dropped']} dropped" if entry["dropped"] else ""
    return (
        f"contamination: {entry['split']} {entry['domain']}: {entry['documents']} documents tested, "
        f"{entry['contaminated']} contaminated{dropped}, {entry['short']} too short to judge"
    )
