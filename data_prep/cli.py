"""The `prepare` verb: arguments and what is said at the end."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from data_prep.embedded import CODE, DOCS
from data_prep.execution import Execution
from data_prep.manifest import Manifest, load_manifest
from data_prep.prepare import EMBEDDED, TRAIN_TOKENIZER, PrepareOptions, prepare
from megatron_ext.errors import UserError

MAX_DEFAULT_WORKERS = 8
INPUT_FORMS = "file, folder or URL of jsonl[.zst|.gz], parquet, WebDataset tars, Megatron .bin/.idx, or text files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `selectron prepare`."""
    parser.add_argument("--input", help=f"{INPUT_FORMS}; or `{EMBEDDED}`")
    parser.add_argument("--output", required=True, help="folder to make; refused if it is there and not empty")
    parser.add_argument("--train-domains", help=f"training domains, separated by commas ({EMBEDDED}: {DOCS})")
    parser.add_argument("--test-domains", help=f"out-of-domain test domains ({EMBEDDED}: {CODE})")
    parser.add_argument("--domain", help="domain of records that name none (else they are malformed)")
    parser.add_argument("--source-tokenizer", help="what made the tokens, where the input is Megatron's .bin/.idx")
    parser.add_argument(
        "--tokenizer",
        help="a tokenizer.json, a .tiktoken file, the name of a tiktoken encoding, RWKV's vocabulary file, "
        f"or `{TRAIN_TOKENIZER}` ({EMBEDDED}: {TRAIN_TOKENIZER})",
    )
    parser.add_argument("--tiktoken-pattern", default="", help="regular expression of a .tiktoken file of one's own")
    parser.add_argument("--eos-token", help="end-of-document token, if the tokenizer has none of the usual ones")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of a tokenizer trained here (%(default)s)")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        help=f"share of the training documents held out, where folders give no split (0.02; {EMBEDDED}: 0.05)",
    )
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="at a malformed record")
    parser.add_argument("--shard-tokens", type=int, default=64_000_000, help="tokens a shard (%(default)s)")
    parser.add_argument(
        "--export-megatron",
        metavar="PREFIX",
        help="write PREFIX_<split>_<domain>_text_document.bin and .idx too; without --input, of a finished --output",
    )
    _add_execution(parser)


def _add_execution(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=int, default=min(cores, MAX_DEFAULT_WORKERS), help="tasks at a time (%(default)s)"
    )
    parser.add_argument("--tasks", type=int, help="parts the input's files are dealt to (by the size of the input)")
    parser.add_argument("--executor", choices=("local", "slurm", "ray"), default="local", help="what runs the tasks")
    parser.add_argument("--slurm-partition", help="for --executor slurm")
    parser.add_argument("--slurm-time", default=Execution.slurm_time, help="limit of a Slurm job (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data and print what was made.

    Returns:
        The exit code 0.

    Raises:
        UserError: see `data_prep.prepare.prepare`.
    """
    _check_export(arguments)
    output = Path(arguments.output)
    if arguments.input is None:
        return _export(arguments, load_manifest(output))
    manifest = prepare(_options(arguments))
    if manifest is None:
        print(f"submitted to Slurm: {output} appears when the jobs are done; what they print is in {output}.slurm")
        return 0
    print(summary(manifest, arguments.output))
    return _export(arguments, manifest) if arguments.export_megatron else 0


def _export(arguments: argparse.Namespace, manifest: Manifest) -> int:
    from data_prep.indexed import export  # brings Megatron and torch, which nothing else here needs

    for prefix in export(Path(arguments.output), manifest, Path(arguments.export_megatron)):
        print(f"exported: {prefix}.bin and .idx")
    return 0


def _check_export(arguments: argparse.Namespace) -> None:
    if arguments.input is None and arguments.export_megatron is None:
        raise UserError("--input", "is not given", "name the documents, or export with --export-megatron what is there")
    if arguments.export_megatron and arguments.executor == "slurm" and arguments.input is not None:
        raise UserError("--export-megatron", "waits for the Slurm jobs", "export in a call of its own, without --input")


def summary(manifest: Manifest, output: str) -> str:
    """Table of the splits and domains, with what was left out."""
    lines = [f"{'split':<12}{'domain':<20}{'documents':>12}{'tokens':>16}{'bytes':>16}"]
    for entry in manifest.domains:
        lines.append(f"{entry.split:<12}{entry.domain:<20}{entry.documents:>12}{entry.tokens:>16}{entry.bytes:>16}")
    if not any(entry.split == "validation" for entry in manifest.domains):
        lines.append("no document fell in the validation split; a larger --validation-fraction holds some out")
    if manifest.duplicates:
        lines.append(f"left out: {manifest.duplicates} exact duplicates")
    lines += [f"skipped: {entry.records} in {entry.file}: {entry.reason}" for entry in manifest.skipped]
    return "\n".join([*lines, f"written: {output}"])


def _options(arguments: argparse.Namespace) -> PrepareOptions:
    is_embedded = arguments.input == EMBEDDED
    tokenizer = arguments.tokenizer or (TRAIN_TOKENIZER if is_embedded else None)
    if tokenizer is None:
        raise UserError("--tokenizer", "is not given", f"give a tokenizer.json, or `{TRAIN_TOKENIZER}` to train one")
    fraction = arguments.validation_fraction
    if fraction is None:
        fraction = 0.05 if is_embedded else 0.02  # few documents: 2 % of them would be a poor sample
    return PrepareOptions(
        input=arguments.input,
        output=arguments.output,
        train_domains=_names(arguments.train_domains) or ([DOCS] if is_embedded else []),
        test_domains=_names(arguments.test_domains) or ([CODE] if is_embedded else []),
        tokenizer=tokenizer,
        eos_token=arguments.eos_token,
        vocab_size=arguments.vocab_size,
        validation_fraction=fraction,
        on_error=arguments.on_error,
        shard_tokens=arguments.shard_tokens,
        tiktoken_pattern=arguments.tiktoken_pattern,
        source_tokenizer=arguments.source_tokenizer,
        domain=arguments.domain,
        tasks=arguments.tasks,
        execution=Execution(
            executor=arguments.executor,
            workers=arguments.workers,
            slurm_partition=arguments.slurm_partition,
            slurm_time=arguments.slurm_time,
        ),
    )


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
