"""Retrieval tests of a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from megatron_ext.evaluation.progress import progress
from megatron_ext.evaluation.retrieval.alphabet import ordinary_tokens
from megatron_ext.evaluation.retrieval.haystack import read_haystack
from megatron_ext.evaluation.retrieval.options import RetrievalOptions, TaskName
from megatron_ext.evaluation.retrieval.results import Record, RetrievalResults, Skipped
from megatron_ext.evaluation.retrieval.samples import Material, Place, Sample, TextSample, TokenSample, Unfit
from megatron_ext.evaluation.retrieval.tasks import TASKS, TextTask
from megatron_ext.evaluation.text_model import TeacherForcedQuery, TextModel
from megatron_ext.utils.errors import UserError

TOGETHER = 1 << 22
"""Approximate number of sample tokens in memory at a time; as Python lists they take some hundred megabytes."""


def evaluate_retrieval(model: TextModel, options: RetrievalOptions) -> RetrievalResults:
    """Run retrieval tests of a model.

    Collective: every rank passes the same options and gets the same results.

    Args:
        model: model under any parallel layout.
        options: tasks, lengths and depths. Every length is checked before the first forward pass.

    Raises:
        UserError: the haystack cannot be read, or a length does not fit and `options.unfit` is `refuse`.
    """
    material, cells, skipped = _plan(model, options)
    found: dict[Place, Record] = {}
    with progress(None, "Retrieval", "sample", total=sum(map(len, cells))) as bar:
        for places in _parts(cells):
            bar.set_postfix_str(f"{places[0].length} tokens")
            found |= zip(places, _run(model, places, material), strict=True)
            bar.update(len(places))
    records = [found[place] for cell in cells for place in cell]
    return RetrievalResults(options, material.haystack.name, model.max_length, records, skipped)


def check_retrieval(model: TextModel, options: RetrievalOptions) -> None:
    """Check the options without a forward pass.

    Raises:
        UserError: as in `evaluate_retrieval`.
    """
    _plan(model, options)


def _plan(model: TextModel, options: RetrievalOptions) -> tuple[Material, list[list[Place]], list[Skipped]]:
    """Return the material, the places of each task and length that fits, and the lengths that do not fit."""
    alphabet = ordinary_tokens(model.encode, model.end_id)
    material = Material(model.encode, read_haystack(options.haystack), alphabet)
    cells, skipped = [], []
    for name in options.tasks:
        for length in options.lengths:
            here = _places(name, length, options)
            reason = _why_not(model, here, material)
            if reason is None:
                cells.append(here)
            elif options.unfit == "refuse":
                hint = "remove it, or set retrieval.unfit=skip"
                raise UserError("retrieval.lengths", f"{length} does not fit {name}: {reason}", hint)
            else:
                skipped.append(Skipped(name, length, reason))
    return material, cells, skipped


def _parts(cells: Sequence[Sequence[Place]]) -> Iterator[Sequence[Place]]:
    """Yield the places of samples that run together: of one length, and with the same generation settings."""
    alike: dict[Hashable, list[Place]] = {}
    for cell in cells:
        task = TASKS[cell[0].task]
        asked = (task.max_tokens, task.is_over) if isinstance(task, TextTask) else None
        alike.setdefault((asked, cell[0].length), []).extend(cell)
    for places in alike.values():
        size = max(1, TOGETHER // places[0].length)
        yield from (places[first : first + size] for first in range(0, len(places), size))


def _places(name: TaskName, length: int, options: RetrievalOptions) -> list[Place]:
    """Return the places of all samples of a task and length, by depth."""
    depths: Sequence[float | None] = options.depths if TASKS[name].has_depth else [None]
    return [Place(name, length, depth, options.seed, i) for depth in depths for i in range(options.samples)]


def _why_not(model: TextModel, places: Sequence[Place], material: Material) -> str | None:
    place = places[0]
    if place.length > model.max_length:
        return f"the model supports at most {model.max_length} tokens"
    task = TASKS[place.task]
    try:
        # The length of a token sequence does not depend on the sample. That of a text does, through its words.
        for one in places if isinstance(task, TextTask) else [place]:
            task.check(one, material)
    except Unfit as reason:
        return str(reason)
    return None


def _run(model: TextModel, places: Sequence[Place], material: Material) -> list[Record]:
    samples = [TASKS[place.task].sample(place, material) for place in places]
    texts = [sample for sample in samples if isinstance(sample, TextSample)]
    return _write(model, texts) + _foretell(model, [sample for sample in samples if isinstance(sample, TokenSample)])


def _write(model: TextModel, samples: Sequence[TextSample]) -> list[Record]:
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
    task = TASKS[sample.place.task]
    assert isinstance(task, TextTask), "it makes texts"
    return task


def _foretell(model: TextModel, samples: Sequence[TokenSample]) -> list[Record]:
    """Score token samples with teacher forcing, one forward pass per sample."""
    if not samples:
        return []
    misses = model.misses([TeacherForcedQuery(sample.tokens, sample.scored) for sample in samples])
    return [
        _record(
            sample,
            1 - wrong / len(sample.scored),
            tuple(model.decode([sample.tokens[at]]) for at in sample.scored),
            None,
        )
        for sample, wrong in zip(samples, misses, strict=True)
    ]


def _record(sample: Sample, score: float, references: tuple[str, ...], generated: str | None) -> Record:
    at = sample.place
    return Record(at.task, at.length, at.depth, at.index, len(sample.tokens), score, references, generated)
