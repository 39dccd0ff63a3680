"""Arguments of the `prepare` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.cleaning import CleaningOptions
from data_prep.contamination.overlap import OverlapOptions
from data_prep.deduplication.duplicates import NearOptions
from data_prep.domains import TEST_DOMAINS, TRAIN_DOMAINS
from data_prep.manifest import Manifest, load_manifest
from data_prep.prepare import EMBEDDED, TRAIN_TOKENIZER, PrepareOptions, prepare
from data_prep.reading.embedded import CODE, DOCS
from data_prep.running.execution import Execution
from data_prep.stages import Filtering
from data_prep.storage import PARTIAL_SUFFIX, SETTINGS_NAME
from data_prep.summary import format_summary
from megatron_ext.utils.errors import EXIT_STOPPED, UserError
from megatron_ext.utils.signals import handle_signals

Group = argparse._ArgumentGroup
MAX_DEFAULT_WORKERS = 8
NEAR_FIELDS = {f"near_{name}": name for name in ("ngram_words", "buckets", "hashes_per_bucket")}
OVERLAP_FIELDS = {"contamination_threshold": "threshold", "ngram_words": "ngram_words"}
INPUT_FORMS = "file, folder or URL of jsonl[.zst|.gz], parquet, WebDataset tars, Megatron .bin/.idx, or text files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `selectron prepare`."""
    _add_files(parser.add_argument_group("input and output"))
    _add_domains(parser.add_argument_group("domains and splits"))
    _add_filtering(parser.add_argument_group("cleaning and duplicates"))
    _add_decontamination(parser.add_argument_group("decontamination"))
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    _add_execution(parser.add_argument_group("execution"))


def _add_files(group: Group) -> None:
    group.add_argument("--input", help=f"{INPUT_FORMS}; or `{EMBEDDED}`")
    group.add_argument("--output", required=True, help="folder to create; must be absent or empty")
    group.add_argument("--source-tokenizer", help="tokenizer of the tokens in Megatron's .bin/.idx")
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="what to do at a malformed record")
    group.add_argument("--shard-tokens", type=int, default=64_000_000, help="tokens per shard (%(default)s)")
    group.add_argument(
        "--export-megatron",
        metavar="PREFIX",
        help="also write PREFIX_<split>_<domain>_text_document.bin and .idx; without --input, from a finished --output",
    )


def _add_domains(group: Group) -> None:
    default = f"all if records name none, otherwise {','.join(TRAIN_DOMAINS)} if present; {EMBEDDED}: {DOCS}"
    group.add_argument("--train-domains", help=f"training domains, separated by commas ({default})")
    default = f"{','.join(TEST_DOMAINS)} if present; {EMBEDDED}: {CODE}"
    meaning = "out-of-domain test domains, separated by commas; '' for none"
    group.add_argument("--test-domains", help=f"{meaning} ({default})")
    group.add_argument("--domain", help="domain of records without one (the input's name if no record has one)")
    group.add_argument("--text-key", metavar="KEY", help="key or column of the text; a.b: key b in object a (text)")
    group.add_argument(
        "--domain-key", metavar="KEY", help="key or column of the domain (meta.redpajama_set_name, or domain)"
    )
    group.add_argument(
        "--validation-fraction",
        type=float,
        help=f"fraction of training documents held out if folders do not determine the split (0.02; {EMBEDDED}: 0.05)",
    )


def _add_filtering(group: Group) -> None:
    group.add_argument(
        "--clean",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="convert to one Unicode form (NFC) and one line ending, remove control characters (on)",
    )
    group.add_argument(
        "--nul",
        choices=("remove", "drop", "stop"),
        help="at a NUL character: remove it, drop the document, or stop (remove)",
    )
    group.add_argument(
        "--duplicates",
        choices=("keep", "exact", "near"),
        default="exact",
        help="drop exact copies, or near-duplicates too (%(default)s); those in test are kept first, then validation",
    )
    near = NearOptions()
    for name, meaning in (
        ("ngram_words", "words per n-gram"),
        ("buckets", "signatures per document; more also find less similar documents"),
        ("hashes_per_bucket", "minima per signature; more require more similar documents"),
    ):
        option = f"--near-{name.replace('_', '-')}"
        group.add_argument(option, type=int, metavar="N", help=f"MinHash: {meaning} ({getattr(near, name)})")


def _add_decontamination(group: Group) -> None:
    group.add_argument(
        "--decontaminate",
        choices=("off", "report", "drop-test", "drop-train"),
        default="report",
        help="report test text in training text; also drop contaminated test documents, or training documents that "
        "contain their n-grams (%(default)s)",
    )
    group.add_argument(
        "--contamination-threshold",
        type=float,
        metavar="SHARE",
        help="fraction of its n-grams above which a test document is contaminated (0: any n-gram)",
    )
    group.add_argument("--ngram-words", type=int, metavar="N", help="words per n-gram (13)")


def _add_tokenizer(group: Group) -> None:
    group.add_argument(
        "--tokenizer",
        help="a tokenizer.json, a Hugging Face folder with one or with vocab.json and merges.txt, a .tiktoken file, "
        "the name of a tiktoken encoding, RWKV's vocabulary file, "
        f"or `{TRAIN_TOKENIZER}` ({EMBEDDED}: {TRAIN_TOKENIZER})",
    )
    group.add_argument("--tiktoken-pattern", default="", help="regular expression of a custom .tiktoken file")
    group.add_argument("--eos-token", help="end-of-document token (the tokenizer's usual one)")
    group.add_argument("--vocab-size", type=int, default=4096, help="vocabulary of a trained tokenizer (%(default)s)")


def _add_execution(group: Group) -> None:
    cores = len(os.sched_getaffinity(0))
    group.add_argument(
        "--workers", type=int, default=min(cores, MAX_DEFAULT_WORKERS), help="concurrent tasks (%(default)s)"
    )
    group.add_argument("--tasks", type=int, help="number of parts of the input (by its size)")
    group.add_argument("--executor", choices=("local", "slurm", "ray"), default="local", help="what runs the tasks")
    group.add_argument("--slurm-partition", help="for --executor slurm")
    group.add_argument("--slurm-time", default=Execution.slurm_time, help="time limit of a Slurm job (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data and print a summary.

    Returns:
        The exit code: 0, or 75 if SIGINT or SIGTERM stopped the run and the same command resumes it.

    Raises:
        UserError: see `data_prep.prepare.prepare`.
        KeyboardInterrupt: SIGINT or SIGTERM stopped the run before there was anything to resume.
    """
    _check_export(arguments)
    output = Path(arguments.output)
    if arguments.input is None:
        return _export(arguments, load_manifest(output))
    try:
        with _interrupted_by_sigterm():
            manifest = prepare(_options(arguments))
    except KeyboardInterrupt:
        partial = output.with_name(output.name + PARTIAL_SUFFIX)
        if not (partial / SETTINGS_NAME).is_file():
            raise
        print(f"selectron: stopped; rerun the same command to resume from {partial}", file=sys.stderr)
        return EXIT_STOPPED
    if manifest is None:
        print(f"submitted to Slurm: {output} appears when the jobs have finished; their logs are in {output}.slurm")
        return 0
    print(format_summary(manifest, arguments.output))
    return _export(arguments, manifest) if arguments.export_megatron else 0


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Context manager in which SIGTERM raises KeyboardInterrupt in this process, but terminates forked processes."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    process = os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() == process:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with handle_signals((signal.SIGTERM,), interrupt):
        yield


def _export(arguments: argparse.Namespace, manifest: Manifest) -> int:
    from data_prep.reading.indexed import export  # imports Megatron and torch, which nothing else here needs

    for prefix in export(Path(arguments.output), manifest, Path(arguments.export_megatron)):
        print(f"exported: {prefix}.bin and .idx")
    return 0


def _check_export(arguments: argparse.Namespace) -> None:
    if arguments.input is None and arguments.export_megatron is None:
        hint = "give the documents, or export a finished --output with --export-megatron"
        raise UserError("--input", "is not given", hint)
    if arguments.export_megatron and arguments.executor == "slurm" and arguments.input is not None:
        problem = "cannot run before the Slurm jobs have finished"
        raise UserError("--export-megatron", problem, "export afterwards in a separate command without --input")


def _options(arguments: argparse.Namespace) -> PrepareOptions:
    is_embedded = arguments.input == EMBEDDED
    tokenizer = arguments.tokenizer or (TRAIN_TOKENIZER if is_embedded else None)
    if tokenizer is None:
        raise UserError("--tokenizer", "is not given", f"give a tokenizer.json, or `{TRAIN_TOKENIZER}` to train one")
    fraction = arguments.validation_fraction
    if fraction is None:
        fraction = 0.05 if is_embedded else 0.02  # there are few embedded documents: 2 % would be a poor sample
    return PrepareOptions(
        input=arguments.input,
        output=arguments.output,
        train_domains=_names(arguments.train_domains, [DOCS] if is_embedded else None),
        test_domains=_names(arguments.test_domains, [CODE] if is_embedded else None),
        filtering=_filtering(arguments),
        tokenizer=tokenizer,
        eos_token=arguments.eos_token,
        vocab_size=arguments.vocab_size,
        validation_fraction=fraction,
        on_error=arguments.on_error,
        shard_tokens=arguments.shard_tokens,
        tiktoken_pattern=arguments.tiktoken_pattern,
        source_tokenizer=arguments.source_tokenizer,
        domain=arguments.domain,
        text_key=arguments.text_key,
        domain_key=arguments.domain_key,
        tasks=arguments.tasks,
        execution=Execution(
            executor=arguments.executor,
            workers=arguments.workers,
            slurm_partition=arguments.slurm_partition,
            slurm_time=arguments.slurm_time,
        ),
    )


def _filtering(arguments: argparse.Namespace) -> Filtering:
    action = arguments.decontaminate.replace("-", "_")
    nul = _given_values(arguments, {"nul": "nul"}, arguments.clean, "remove --no-clean")
    near = _given_values(arguments, NEAR_FIELDS, arguments.duplicates == "near", "pass --duplicates near")
    overlap = _given_values(arguments, OVERLAP_FIELDS, action != "off", "remove --decontaminate off")
    return Filtering(
        cleaning=CleaningOptions(**nul) if arguments.clean else None,
        duplicates=arguments.duplicates,
        near=NearOptions(**near),
        overlap=None if action == "off" else OverlapOptions(action=action, **overlap),
    )


def _given_values(arguments: argparse.Namespace, names: dict[str, str], is_used: bool, hint: str) -> dict[str, Any]:
    """Return the given arguments by their fields' names; raise UserError if they are given but not used."""
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if values and not is_used:
        raise UserError(f"--{next(iter(values)).replace('_', '-')}", "has no effect with these options", hint)
    return {names[name]: value for name, value in values.items()}


def _names(text: str | None, default: list[str] | None) -> list[str] | None:
    return default if text is None else [name.strip() for name in text.split(",") if name.strip()]
