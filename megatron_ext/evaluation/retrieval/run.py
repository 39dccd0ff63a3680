"""Runs the tests of retrieval over a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from megatron_ext.errors import UserError
from megatron_ext.evaluation.retrieval.alphabet import ordinary_tokens
from megatron_ext.evaluation.retrieval.haystack import read_haystack
from megatron_ext.evaluation.retrieval.options import RetrievalOptions, TaskName
from megatron_ext.evaluation.retrieval.results import Record, RetrievalResults, Skipped
from megatron_ext.evaluation.retrieval.samples import Material, Place, Sample, TextSample, TokenSample, Unfit
from megatron_ext.evaluation.retrieval.scoring import token_accuracy
from megatron_ext.evaluation.retrieval.tasks import TASKS, TextTask
from megatron_ext.evaluation.text_model import Request, TextModel


def evaluate_retrieval(model: TextModel, options: RetrievalOptions) -> RetrievalResults:
    """Test what a model finds again in its context.

    Collective, as the model's calls are: every rank gives the same options and gets the same results.

    Args:
        model: under any layout.
        options: what to test. Every length is checked before the model is first called.

    Raises:
        UserError: the haystack cannot be read, or a length does not fit and `options.unfit` is `refuse`.
    """
    alphabet = ordinary_tokens(model.encode, model.end_id)
    material = Material(model.encode, read_haystack(options.haystack), alphabet)
    skipped: list[Skipped] = []
    records: list[Record] = []
    for cell in _fitting(model, options, material, skipped):
        records += _run(model, cell, material)
    return RetrievalResults(options, material.haystack.name, model.max_length, records, skipped)


def _fitting(
    model: TextModel, options: RetrievalOptions, material: Material, skipped: list[Skipped]
) -> list[list[Place]]:
    """Samples' places of each task, length and depth that fits; what does not is added to `skipped`."""
    cells = []
    for name in options.tasks:
        for length in options.lengths:
            here = _cells(name, length, options)
            reason = _why_not(model, here, material)
            if reason is None:
                cells += here
                continue
            if options.unfit == "refuse":
                mend = "leave it out, or set retrieval.unfit to skip"
                raise UserError("retrieval.lengths", f"{length} does not fit for {name}: {reason}", mend)
            skipped.append(Skipped(name, length, reason))
    return cells


def _cells(name: TaskName, length: int, options: RetrievalOptions) -> list[list[Place]]:
    """All samples of a task and length, those of one depth together."""
    depths: Sequence[float | None] = options.depths if TASKS[name].has_depth else [None]
    return [[Place(name, length, depth, options.seed, i) for i in range(options.samples)] for depth in depths]


def _why_not(model: TextModel, cells: Sequence[Sequence[Place]], material: Material) -> str | None:
    place = cells[0][0]
    if place.length > model.max_length:
        return f"the model takes {model.max_length} tokens at most"
    task = TASKS[place.task]
    try:
        # A sequence of tokens fits or not whatever is drawn; a text has as many tokens as its words happen to have.
        for one in chain(*cells) if isinstance(task, TextTask) else [place]:
            task.check(one, material)
    except Unfit as reason:
        return str(reason)
    return None


def _run(model: TextModel, cell: Sequence[Place], material: Material) -> list[Record]:
    task = TASKS[cell[0].task]
    if isinstance(task, TextTask):
        return _write(model, task, [task.sample(place, material) for place in cell])
    return _foretell(model, [task.sample(place, material) for place in cell])


def _write(model: TextModel, task: TextTask, samples: Sequence[TextSample]) -> list[Record]:
    """Let the model go on with prompts."""
    prompts = [sample.tokens for sample in samples]
    answers = model.generate(prompts, task.max_tokens, lambda tokens: task.is_over(model.decode(tokens)))
    texts = [model.decode(answer) for answer in answers]
    return [
        _record(sample, task.score(text, sample.references), sample.references, text)
        for sample, text in zip(samples, texts, strict=True)
    ]


def _foretell(model: TextModel, samples: Sequence[TokenSample]) -> list[Record]:
    """Ask for each scored token, those before it given (teacher forcing)."""
    records = []
    for sample in samples:  # one at a time: its requests hold as many copies of a long context
        requests = [Request(sample.tokens[:at], sample.tokens[at : at + 1]) for at in sample.scored]
        right = [score.is_greedy for score in model.scores(requests)]
        due = tuple(model.decode(request.continuation) for request in requests)
        records.append(_record(sample, token_accuracy(right), due, None))
    return records


def _record(sample: Sample, score: float, references: tuple[str, ...], generated: str | None) -> Record:
    at = sample.place
    return Record(at.task, at.length, at.depth, at.index, len(sample.tokens), score, references, generated)
