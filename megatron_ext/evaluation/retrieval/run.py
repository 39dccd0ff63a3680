"""Retrieval tests of a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from megatron_ext.evaluation.progress import progress
from megatron_ext.evaluation.retrieval.alphabet import ordinary_tokens
from megatron_ext.evaluation.retrieval.haystack import read_haystack
from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.registry import TextTask, load_all
from megatron_ext.evaluation.retrieval.results import Record, RetrievalResults, Skipped
from megatron_ext.evaluation.retrieval.samples import (
    DoesNotFitError,
    Sample,
    SampleInputs,
    SampleKey,
    TextSample,
    TokenSample,
)
from megatron_ext.evaluation.text_model import TeacherForcedQuery, TextModel
from megatron_ext.utils.errors import UserError

_TASKS = load_all()

MAX_BATCH_TOKENS = 1 << 22
"""Approximate number of sample tokens in memory at a time; as Python lists they take a few hundred megabytes."""


def evaluate_retrieval(model: TextModel, options: RetrievalOptions) -> RetrievalResults:
    """Run retrieval tests of a model.

    Collective: every rank passes the same options and gets the same results.

    Args:
        model: model under any parallel layout.
        options: tasks, lengths and depths. Every length is checked before the first forward pass.

    Raises:
        UserError: the haystack cannot be read, or a length does not fit and `options.unfit` is `refuse`.
    """
    inputs, key_groups, skipped = _plan(model, options)
    records_by_key: dict[SampleKey, Record] = {}
    with progress(None, "Retrieval", "sample", total=sum(map(len, key_groups))) as bar:
        for sample_keys in _batches(key_groups):
            bar.set_postfix_str(f"{sample_keys[0].length} tokens")
            records_by_key |= zip(sample_keys, _run_batch(model, sample_keys, inputs), strict=True)
            bar.update(len(sample_keys))
    records = [records_by_key[sample_key] for group in key_groups for sample_key in group]
    return RetrievalResults(options, inputs.haystack.name, model.max_length, records, skipped)


def check_retrieval(model: TextModel, options: RetrievalOptions) -> None:
    """Check the options without a forward pass.

    Raises:
        UserError: as in `evaluate_retrieval`.
    """
    _plan(model, options)


def _plan(model: TextModel, options: RetrievalOptions) -> tuple[SampleInputs, list[list[SampleKey]], list[Skipped]]:
    """Return the inputs of samples, the keys of each task and length that fits, and the lengths that do not fit."""
    alphabet = ordinary_tokens(model.encode, model.end_id)
    inputs = SampleInputs(model.encode, read_haystack(options.haystack), alphabet)
    key_groups, skipped = [], []
    for name in options.tasks:
        for length in options.lengths:
            keys = _sample_keys(name, length, options)
            reason = _misfit_reason(model, keys, inputs)
            if reason is None:
                key_groups.append(keys)
            elif options.unfit == "refuse":
                hint = "remove it, or set retrieval.unfit=skip"
                raise UserError("retrieval.lengths", f"{length} does not fit {name}: {reason}", hint)
            else:
                skipped.append(Skipped(name, length, reason))
    return inputs, key_groups, skipped


def _batches(key_groups: Sequence[Sequence[SampleKey]]) -> Iterator[Sequence[SampleKey]]:
    """Yield the keys of samples that run in one batch: of one length, and with the same generation settings."""
    groups: dict[Hashable, list[SampleKey]] = {}
    for group in key_groups:
        task = _TASKS[group[0].task]
        settings = (task.max_tokens, task.is_over) if isinstance(task, TextTask) else None
        groups.setdefault((settings, group[0].length), []).extend(group)
    for sample_keys in groups.values():
        size = max(1, MAX_BATCH_TOKENS // sample_keys[0].length)
        yield from (sample_keys[first : first + size] for first in range(0, len(sample_keys), size))


def _sample_keys(name: str, length: int, options: RetrievalOptions) -> list[SampleKey]:
    """Return the keys of all samples of a task and length, by depth."""
    depths: Sequence[float | None] = options.depths if _TASKS[name].has_depth else [None]
    return [SampleKey(name, length, depth, options.seed, i) for depth in depths for i in range(options.samples)]


def _misfit_reason(model: TextModel, sample_keys: Sequence[SampleKey], inputs: SampleInputs) -> str | None:
    sample_key = sample_keys[0]
    if sample_key.length > model.max_length:
        return f"the model supports at most {model.max_length} tokens"
    task = _TASKS[sample_key.task]
    try:
        # The length of a token sequence does not depend on the sample. That of a text does, through its words.
        for checked in sample_keys if isinstance(task, TextTask) else [sample_key]:
            task.check(checked, inputs)
    except DoesNotFitError as error:
        return str(error)
    return None


def _run_batch(model: TextModel, sample_keys: Sequence[SampleKey], inputs: SampleInputs) -> list[Record]:
    samples = [_TASKS[sample_key.task].sample(sample_key, inputs) for sample_key in sample_keys]
    text_samples = [sample for sample in samples if isinstance(sample, TextSample)]
    token_samples = [sample for sample in samples if isinstance(sample, TokenSample)]
    return _generate_answers(model, text_samples) + _score_tokens(model, token_samples)


def _generate_answers(model: TextModel, samples: Sequence[TextSample]) -> list[Record]:
    """Generate and score the answers of text samples, whose tasks have the same generation settings."""
    if not samples:
        return []
    tasks = [_text_task(sample) for sample in samples]
    prompts, is_over = [sample.tokens for sample in samples], tasks[0].is_over
    answers = model.generate(prompts, tasks[0].max_tokens, lambda tokens: is_over(model.decode(tokens)))
    texts = [model.decode(answer) for answer in answers]
    return [
        _record(sample, task.score(text, sample.references), sample.references, text)
        for sample, task, text in zip(samples, tasks, texts, strict=True)
    ]


def _text_task(sample: TextSample) -> TextTask:
    task = _TASKS[sample.key.task]
    assert isinstance(task, TextTask), "only text tasks build text samples"
    return task


def _score_tokens(model: TextModel, samples: Sequence[TokenSample]) -> list[Record]:
    """Score token samples with teacher forcing, one forward pass per sample."""
    if not samples:
        return []
    misses = model.misses([TeacherForcedQuery(sample.tokens, sample.scored) for sample in samples])
    return [
        _record(
            sample,
            1 - num_wrong / len(sample.scored),
            tuple(model.decode([sample.tokens[position]]) for position in sample.scored),
            None,
        )
        for sample, num_wrong in zip(samples, misses, strict=True)
    ]


def _record(sample: Sample, score: float, references: tuple[str, ...], generated: str | None) -> Record:
    key = sample.key
    return Record(key.task, key.length, key.depth, key.index, len(sample.tokens), score, references, generated)
