"""Manifest of a prepared folder: load, save and verify."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from data_prep.manifest_checks import check_manifest
from data_prep.manifest_entries import MANIFEST_NAME as MANIFEST_NAME
from data_prep.manifest_entries import CountEntry as CountEntry
from data_prep.manifest_entries import DomainEntry as DomainEntry
from data_prep.manifest_entries import Manifest as Manifest
from data_prep.manifest_entries import ShardEntry as ShardEntry
from data_prep.manifest_entries import SkippedEntry as SkippedEntry
from data_prep.manifest_entries import TokenizerEntry as TokenizerEntry
from data_prep.manifest_entries import TokenizerKind as TokenizerKind
from data_prep.manifest_entries import UnusedEntry as UnusedEntry
from data_prep.manifest_entries import match_domain as match_domain
from data_prep.storage import sha256_of
from megatron_ext.utils.atomic_files import os_error_reason, read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

VERSION = 1

VerifyMode = Literal["sha256", "size"]

_PREPARE_HINT = "prepare the data again with `selectron prepare`"


def save_manifest(root: Path, manifest: Manifest) -> None:
    """Write manifest.json atomically. Call this last: a folder without a manifest is unfinished."""
    content = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    write_atomically(root / MANIFEST_NAME, content.encode())


def load_manifest(root: Path) -> Manifest:
    """Read the manifest of a prepared folder.

    Raises:
        UserError: the manifest is missing, damaged, or of another version; see `parse_manifest`.
    """
    path = root / MANIFEST_NAME
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", _PREPARE_HINT) from None
    return parse_manifest(content, str(path))


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Parse and check the content of a manifest file. The files that the manifest names are not accessed.

    Args:
        text: content of the file.
        where: location of the file, for messages.

    Raises:
        UserError: the manifest is damaged, has another version, names files outside its folder, or has inconsistent
            counts.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(where, f"is damaged ({error})", _PREPARE_HINT) from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise UserError(where, f"has version {version!r:.40}, but this program reads version {VERSION}", _PREPARE_HINT)
    try:
        # Strict: a string or 2.5 is not a count. JSON mode accepts dictionaries for the nested entries.
        manifest = TypeAdapter(Manifest).validate_json(text, strict=True)
    except ValidationError as error:
        error_info = error.errors(include_url=False)[0]
        location = ".".join(str(part) for part in error_info["loc"])
        raise UserError(where, f"is damaged ({location}: {error_info['msg']})", _PREPARE_HINT) from None
    check_manifest(manifest, where)
    return manifest


def verify_shard(root: Path, shard: ShardEntry, mode: VerifyMode) -> None:
    """Check one shard and its index against the manifest.

    Args:
        root: folder of the manifest.
        shard: entry of the shard in the manifest.
        mode: `size` only compares sizes. `sha256` reads the whole files.

    Raises:
        UserError: a file is missing, or has another size or content. The message names the file.
    """
    _verify_file(root / shard.file, shard.bytes, shard.sha256, mode)
    _verify_file(root / shard.index, shard.index_bytes, shard.index_sha256, mode)


def _verify_file(path: Path, size: int, sha256: str, mode: VerifyMode) -> None:
    hint = "copy it again or prepare the data again"
    if not path.is_file():
        raise UserError(str(path), "is missing", hint)
    actual = path.stat().st_size
    if actual != size:
        state = "truncated" if actual < size else "too long"
        raise UserError(str(path), f"is {state}: expected {size} bytes, found {actual}", hint)
    if mode == "sha256" and (found := sha256_of(path)) != sha256:
        raise UserError(str(path), f"sha256 differs: expected {sha256}, found {found}", hint)


def verify_tokenizer(root: Path, manifest: Manifest, tokenizer: Path | None = None) -> Path:
    """Check by sha256 that a tokenizer file is the one with which the data was prepared.

    Args:
        root: folder of the manifest.
        manifest: manifest of the folder.
        tokenizer: file to check. None: the tokenizer in the folder of the manifest.

    Returns:
        The checked file.

    Raises:
        UserError: the file is missing or its sha256 differs. The message names the file and the manifest.
    """
    path = tokenizer if tokenizer is not None else root / manifest.tokenizer.file
    manifest_path = root / MANIFEST_NAME
    if not path.is_file():
        raise UserError(str(path), f"is missing (the tokenizer of {manifest_path})", "give its path or copy it there")
    found = sha256_of(path)
    if found != manifest.tokenizer.sha256:
        problem = f"is not the tokenizer of {manifest_path}: sha256 {found[:12]}, expected"
        hint = f"use {root / manifest.tokenizer.file} or prepare the data again"
        raise UserError(str(path), f"{problem} {manifest.tokenizer.sha256[:12]}", hint)
    return path
