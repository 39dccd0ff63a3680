"""Implementation of `selectron prepare`: from raw documents to tokenised shards."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from data_prep.documents import Corpus, Problems
from data_prep.domains import (
    FOLDER_NAME_PATTERN,
    UNNAMED,
    find_domains,
    folder_name,
    has_domain_names,
    require_any_domain,
    resolve_domains,
)
from data_prep.ledger import Ledger
from data_prep.manifest import MANIFEST_NAME, Manifest, load_manifest, match_domain
from data_prep.output.merging import FinishStep
from data_prep.reading import embedded
from data_prep.reading.corpus import FileCorpus, open_files
from data_prep.reading.fields import TEXT_KEY, Fields
from data_prep.running.execution import Execution, check_execution, run_stages
from data_prep.running.slurm import submit
from data_prep.running.workers import allow_open_files
from data_prep.splits import SplitPlan
from data_prep.stages import Filtering, Preparation
from data_prep.steps import reading_steps
from data_prep.storage import publish, sha256_of, unfinished_folder, was_published
from data_prep.tokenization.tokenizer import JsonTokenizer, train_tokenizer
from data_prep.tokenization.vocabularies import (
    TextTokenizer,
    end_of_document,
    open_tokenizer,
    save_tokenizer,
    tokenizer_files,
)
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.credentials import redact_tree
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import check_text

EMBEDDED = "embedded"
TRAIN_TOKENIZER = "train"
TASK_BYTES = 4 << 20
"""Default input bytes per task: some seconds of work, which is the most that each worker loses if it is killed."""

MAX_DEFAULT_TASKS = 1000


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of `selectron prepare`.

    Attributes:
        input: file, folder or URL of documents, or `embedded`.
        output: folder to create.
        train_domains: domains of the train and validation splits. None: the domains of `TRAIN_DOMAINS` that the input
            contains. If no record names a domain, all records belong to one training domain (see `domain`).
        test_domains: domains of the test split, disjoint from the training domains; None: the domains of `TEST_DOMAINS`
            that the input contains.
        filtering: cleaning, deduplication and decontamination.
        tokenizer: a tokenizer.json, a folder with tokenizer.json or with vocab.json and merges.txt, a .tiktoken file,
            the name of a tiktoken encoding, RWKV's vocabulary file, or `train` to train a tokenizer on the train split.
        tiktoken_pattern: regular expression that splits text, for a .tiktoken file that is not one of tiktoken's own.
        source_tokenizer: tokenizer of the tokens in Megatron's .bin/.idx files.
        domain: domain of records that name no domain. None: such records are malformed, unless no record of the input
            names a domain. All records then belong to a domain named after the input.
        text_key: key or column of a record's text; None: `text`.
        domain_key: key or column of a record's domain; None: SlimPajama's `meta.redpajama_set_name`, or `domain`.
        eos_token: end-of-document token; None: the first common end-of-document token in the vocabulary.
        vocab_size: vocabulary size of a tokenizer trained here.
        validation_fraction: fraction of the training documents that is held out for validation, if folders do not
            determine the split.
        on_error: stop at a malformed record, or skip and count it.
        shard_tokens: tokens per shard.
        tasks: number of tasks among which the input's files are divided. Each task writes its own shards. None:
            chosen by input size.
        execution: executor and number of workers; the result does not depend on it.
        progress: show a progress bar on standard error.
    """

    input: str
    output: str
    train_domains: list[str] | None = None
    test_domains: list[str] | None = None
    filtering: Filtering = field(default_factory=Filtering)
    tokenizer: str = TRAIN_TOKENIZER
    tiktoken_pattern: str = ""
    source_tokenizer: str | None = None
    domain: str | None = None
    text_key: str | None = None
    domain_key: str | None = None
    eos_token: str | None = None
    vocab_size: int = 4096
    validation_fraction: float = 0.02
    on_error: Literal["stop", "skip"] = "stop"
    shard_tokens: int = 64_000_000
    tasks: int | None = None
    execution: Execution = field(default_factory=Execution)
    progress: bool = True


def prepare(options: PrepareOptions) -> Manifest | None:
    """Create the folder `options.output` with shards, the tokenizer and the manifest, which is written last.

    The folder appears atomically. The same input and options give the same bytes for any number of workers. An
    interrupted preparation is resumed.

    Returns:
        The manifest; None if the work was submitted to Slurm and continues there.

    Raises:
        UserError: an option, a record or a file is invalid, or the disk is full.
    """
    _check(options)
    check_execution(options.execution)
    # The tokenizer library reads these variables once, when it first runs in parallel, i.e. to train a tokenizer.
    os.environ["RAYON_NUM_THREADS"] = str(options.execution.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    output = Path(options.output)
    try:
        options, corpus = _assign_single_domain(options, open_corpus(options))
        recorded = _recorded_options(options, options.tasks or default_tasks(corpus))
        if options.filtering.duplicates != "keep":
            allow_open_files(recorded["tasks"])  # a later stage needs this limit: fail now rather than hours later
        settings = _resume_settings(recorded, corpus, options)
        if was_published(output, settings):  # interrupted after the folder was renamed, before its markers were removed
            return load_manifest(output)
        with unfinished_folder(output, settings) as partial:
            if (partial / MANIFEST_NAME).exists():  # interrupted after the manifest, before the folder was renamed
                publish(partial, output)
                return load_manifest(output)
            return _run_preparation(partial, corpus, options, recorded)
    except OSError as error:
        where = str(error.filename or output)
        hint = "free space or fix the path, then rerun the same command to resume"
        raise UserError(where, f"cannot be read or written ({os_error_reason(error)})", hint) from None


def open_corpus(options: PrepareOptions) -> Corpus:
    """Open the corpus that `--input` names."""
    if options.input == EMBEDDED:
        return embedded.EmbeddedCorpus()
    tokenizer = open_tokenizer(options.source_tokenizer) if options.source_tokenizer else None
    fields = Fields(options.text_key or TEXT_KEY, options.domain_key, options.domain)
    return open_files(options.input, fields, tokenizer)


def _assign_single_domain(options: PrepareOptions, corpus: Corpus) -> tuple[PrepareOptions, Corpus]:
    """Return options and corpus. If no domains are requested and no record names one, give all records one domain.

    The domain is `options.domain`, or is named after the input. It becomes the only training domain.
    """
    if not isinstance(corpus, FileCorpus) or options.train_domains is not None or options.domain_key is not None:
        return options, corpus
    if corpus.has_own_domains or has_domain_names(corpus.with_default(UNNAMED), Problems(options.on_error)):
        return options, corpus
    name = options.domain or folder_name(corpus.name)
    _check_names([name])
    options = replace(options, domain=name, train_domains=[name], test_domains=options.test_domains or [])
    return options, corpus.with_default(name)


def default_tasks(corpus: Corpus) -> int:
    """Return the number of tasks for a corpus. It depends only on the corpus, so that shards are reproducible."""
    return max(1, min(corpus.units, corpus.total_bytes // TASK_BYTES, MAX_DEFAULT_TASKS))


def _check_text(options: PrepareOptions) -> None:
    """Raise a `UserError` for option values that shells, Slurm or datatrove's paths would misinterpret."""
    values = {"--input": options.input, "--output": options.output, "--source-tokenizer": options.source_tokenizer}
    execution = options.execution
    values |= {"--slurm-partition": execution.slurm_partition, "--slurm-time": execution.slurm_time}
    for option, value in values.items():
        check_text(option, str(value or ""))
    if "://" in str(options.output) or "::" in str(options.output):
        raise UserError("--output", f"{options.output} is not a local path", "give a path without :// and ::")
    if execution.executor == "slurm" and "\\" in str(Path(options.output).absolute()):
        raise UserError("--output", f"{options.output} contains a backslash, which Slurm drops", "choose another name")


def _check(options: PrepareOptions) -> None:
    _check_text(options)
    for name, value in (
        ("--shard-tokens", options.shard_tokens),
        ("--workers", options.execution.workers),
        ("--tasks", options.tasks),
    ):
        if value is not None and value < 1:
            raise UserError(name, f"{value} is not positive", "give 1 or more")
    if not 0 <= options.validation_fraction < 1:
        problem = f"{options.validation_fraction} is not in [0, 1)"
        raise UserError("--validation-fraction", problem, "give 0 or more, below 1")
    if options.train_domains is not None and not options.train_domains:
        raise UserError("--train-domains", "no domain is given", "give one or more, separated by commas")
    _check_names([*(options.train_domains or []), *(options.test_domains or [])])


def _check_names(domains: list[str]) -> None:
    for name in domains:
        if not FOLDER_NAME_PATTERN.fullmatch(name):
            raise UserError(
                "--train-domains/--test-domains", f"{name!r} is not a valid folder name", "rename the domain"
            )


def _run_preparation(root: Path, corpus: Corpus, options: PrepareOptions, recorded: dict[str, Any]) -> Manifest | None:
    plan = _build_split_plan(corpus, options)
    tokenizer = _open_or_train_tokenizer(root, corpus, plan, options)
    preparation = Preparation(
        root=root,
        corpus=corpus,
        plan=plan,
        filtering=options.filtering,
        tokenizer=save_tokenizer(root, tokenizer, end_of_document(tokenizer, options.eos_token)),
        tasks=recorded["tasks"],
        on_error=options.on_error,
        shard_tokens=options.shard_tokens,
    )
    finish = FinishStep(preparation.merge(recorded), Path(options.output))
    if options.execution.executor == "slurm":
        logs = f"{options.output}.slurm"
        submit(preparation.stages(), root, finish, logs, options.execution, corpus.total_bytes)
        return None
    run_stages(preparation.stages(), root, options.execution, corpus.total_bytes, progress=options.progress)
    return finish.merge()


def _build_split_plan(corpus: Corpus, options: PrepareOptions) -> SplitPlan:
    train, test = resolve_domains(options.train_domains, options.test_domains)
    overlapping = [name for name in train if match_domain(name, test)]
    if overlapping:
        problem = f"{', '.join(overlapping)} is both a training domain and a test domain"
        raise UserError("--test-domains", problem, "remove it from --train-domains or --test-domains")
    optional: list[str] = []
    if options.train_domains is None:
        if not train:
            problem = "is not given, and the default domains are test domains"
            raise UserError("--train-domains", problem, "give one or more domains")
        require_any_domain(corpus, train)
        optional += train
    else:
        train = find_domains(corpus, train, "--train-domains")
    if options.test_domains is None:
        optional += test
    elif test:
        test = find_domains(corpus, test, "--test-domains")
    folders = corpus.folders
    plan = SplitPlan(frozenset(train), frozenset(test), folders, options.validation_fraction, frozenset(optional))
    overlap = options.filtering.overlap
    if overlap is not None and overlap.action != "report" and not plan.has_test:
        raise UserError("--decontaminate", "there are no test documents", "give --test-domains or remove it")
    return plan


def _open_or_train_tokenizer(root: Path, corpus: Corpus, plan: SplitPlan, options: PrepareOptions) -> TextTokenizer:
    if options.tokenizer != TRAIN_TOKENIZER:
        return open_tokenizer(options.tokenizer, options.tiktoken_pattern)
    path = root / JsonTokenizer.file_name
    if path.exists():  # trained before an interruption
        return open_tokenizer(str(path))
    documents: Any = None
    for step in reading_steps(corpus, plan, options.filtering.cleaning, Problems(options.on_error), Ledger()):
        documents = step.run(documents)
    texts = (document.text for document in documents if document.metadata["split"] == "train")
    return JsonTokenizer(train_tokenizer(texts, options.vocab_size))


def _recorded_options(options: PrepareOptions, tasks: int) -> dict[str, Any]:
    """Return the options that determine the prepared data, i.e. all except output path, execution and progress."""
    recorded = asdict(options)
    for name in ("output", "execution", "progress", "filtering"):
        del recorded[name]
    recorded["train_domains"], recorded["test_domains"] = resolve_domains(options.train_domains, options.test_domains)
    return {**redact_tree(recorded), **options.filtering.as_options(), "tasks": tasks}


def _resume_settings(recorded: dict[str, Any], corpus: Corpus, options: PrepareOptions) -> dict[str, Any]:
    """Return the state that must be equal for a preparation to resume: options, and digests of the input files."""
    settings = {f"--{name.replace('_', '-')}": value for name, value in recorded.items()}
    for name in (options.tokenizer, options.source_tokenizer):
        for path in tokenizer_files(name) if name else ():
            settings[f"{path} of sha256"] = sha256_of(path)
    return {**settings, "input files of digest": corpus.identity()}
