"""What suites do: a model is put to the test under any layout, its results are written and its scores known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from data_prep.manifest import Manifest
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.layout import sequence_parallel
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.config.traits import fetched_chunk_size
from megatron_ext.errors import UserError
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses, write_domains
from megatron_ext.evaluation.domains import DomainEvaluator, EvaluationDomain, evaluation_domains
from megatron_ext.evaluation.fewshot import results as fewshot_results
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.run import check_fewshot, evaluate_fewshot
from megatron_ext.evaluation.language_model import LanguageModel
from megatron_ext.evaluation.retrieval import report as retrieval_results
from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.run import check_retrieval, evaluate_retrieval
from megatron_ext.evaluation.token_losses import TokenLosses
from megatron_ext.files import os_reason
from megatron_ext.mixers.registry import load_all
from megatron_ext.paths import path_within
from megatron_ext.platform import Platform
from megatron_ext.training.coder import Coder
from megatron_ext.training.datasets import open_tests, packing_of
from megatron_ext.training.starting import say_on_first_rank

MULTIPLE = 64
"""Lengths are padded to a multiple of it: few shapes, for which kernels are chosen and compiled."""


@dataclass(frozen=True)
class Evaluated:
    """A model that is put to the test.

    Attributes:
        config: of its run, whole; the layout is that of the groups.
        name: of the run.
        progress: how far it has been trained.
        tokenizer_sha256: of the tokenizer of its training data; None: not known.
        coder: its tokenizer.
        chunks: of it on this rank.
        groups: process groups.
        platform: where this runs.
    """

    config: RunConfig
    name: str
    progress: Progress
    tokenizer_sha256: str | None
    coder: Coder
    chunks: Sequence[MegatronModule]
    groups: ProcessGroupCollection
    platform: Platform

    @property
    def about(self) -> dict[str, Any]:
        """Which model it is."""
        return {"run": self.name, "step": self.progress.step, "tokens": self.progress.tokens}

    def token_losses(self) -> TokenLosses:
        """Losses of tokens, in samples as the run was trained on."""
        data, training = self.config.data, self.config.training
        sizes = data.seq_length, training.micro_batch_size
        return TokenLosses(self.chunks, self.groups, self.platform, *sizes, reset_attention=data.reset_attention)

    def language_model(self) -> LanguageModel:
        """The model with its tokenizer."""
        longest = self.config.model.max_position_embeddings
        assert longest is not None, "derived"
        return LanguageModel(
            self.chunks,
            self.coder,
            self.groups,
            self.platform,
            max_length=longest,
            micro_batch_size=self.config.training.micro_batch_size,
            multiple=_multiple(self.config),
        )


def _multiple(config: RunConfig) -> int:
    """What lengths must be multiples of, so that the layout can cut them."""
    parallel, traits = config.parallel, load_all()
    ranks = parallel.context * (parallel.tensor if sequence_parallel(config) else 1)
    mixers = {name: config.mixers.get(name, {}) for name in parse_pattern(config.model.pattern)}
    sizes = [fetched_chunk_size(traits[name], fields) or 1 for name, fields in mixers.items()]
    return math.lcm(MULTIPLE, ranks, *(parallel.context * size for size in sizes if parallel.context > 1))


@dataclass(frozen=True)
class Tested:
    """What a suite found, on the first rank.

    Attributes:
        summary: a table.
        scores: numbers of the table by name, as records of a run keep them.
    """

    summary: str
    scores: dict[str, float]


Test = Callable[[Evaluated, Any, Path], Tested | None]
"""Tests a model with the suite's own options. The first rank writes results into a folder, and has them."""


Check = Callable[[Evaluated, Any], None]
"""Refuses options that the test of the same suite would refuse, by tokenizer, files and layout, with a UserError. It
computes nothing: the model's chunks may be missing."""


def results_folder(run: Path, step: int) -> Path:
    """Where results of a run's step are, unless told otherwise."""
    return path_within(run, f"evaluation/step_{step}", str(run))


def make_folder(folder: Path) -> None:
    """Make a folder for results; raises a UserError if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        doing = "written to" if folder.is_dir() else "made"
        raise UserError(str(folder), f"cannot be {doing} ({os_reason(error)})", "choose another --output") from error


def domains(evaluated: Evaluated, options: DomainOptions, output: Path) -> Tested | None:
    """Loss by domain; see `Test`. `check_domains` has compared the text's sha256."""
    config, progress = evaluated.config, evaluated.progress
    data = config.data
    manifest, found = _open_domains(evaluated, options, replace(data, verify="size"))
    size = config.training.micro_batch_size
    evaluator = DomainEvaluator(evaluated.token_losses(), found, size, packing_of(data), shows_progress=True)
    records = evaluator.evaluate(progress.step, progress.tokens)
    losses = domain_losses(
        records, manifest, options, lambda i: evaluated.coder.bytes_of(found[i].samples.first_tokens().tolist())
    )
    if dist.get_rank() != 0:
        return None
    summary = write_domains(losses, options, evaluated.about, output)
    return Tested(summary, {f"{one.split}/{one.domain}": one.loss for one in losses})


def check_domains(evaluated: Evaluated, options: DomainOptions) -> None:
    """Refuse data that are missing, damaged or of another tokenizer; see `Check`. A collective call."""
    for line in options.warnings():
        say_on_first_rank(line)
    _open_domains(evaluated, options, evaluated.config.data)


def _open_domains(
    evaluated: Evaluated, options: DomainOptions, data: DataConfig
) -> tuple[Manifest, list[EvaluationDomain]]:
    root, manifest, train, test = open_tests(data)
    _check_tokens(evaluated, manifest)
    return manifest, evaluation_domains(root, manifest, train, test, data.seq_length, options.sequences)


def _check_tokens(evaluated: Evaluated, manifest: Manifest) -> None:
    if evaluated.tokenizer_sha256 not in (None, manifest.tokenizer.sha256):
        problem = f"{evaluated.config.data.path} was made with another tokenizer than {evaluated.name}"
        raise UserError("data.path", problem, "prepare the data with the tokenizer in the run's folder")


def retrieval(evaluated: Evaluated, options: RetrievalOptions, output: Path) -> Tested | None:
    """What the model finds again in its context; see `Test`."""
    results = evaluate_retrieval(evaluated.language_model(), options)
    if dist.get_rank() != 0:
        return None
    retrieval_results.write_results(results, evaluated.about, output)
    scores = {f"{one.task}/{one.length}": one.score for one in results.by_length()}
    return Tested(retrieval_results.markdown(results), scores)


def check_retrieval_options(evaluated: Evaluated, options: RetrievalOptions) -> None:
    """Refuse lengths that do not fit and a haystack that cannot be read; see `Check`."""
    check_retrieval(evaluated.language_model(), options)


def check_fewshot_options(evaluated: Evaluated, options: FewshotOptions) -> None:
    """Refuse tasks that cannot be loaded; see `Check`."""
    check_fewshot(options, evaluated.language_model().max_length)


def fewshot(evaluated: Evaluated, options: FewshotOptions, output: Path) -> Tested | None:
    """Tasks of lm-eval; see `Test`."""
    results = evaluate_fewshot(evaluated.language_model(), options)
    if results is None:
        return None
    fewshot_results.write_results(results, evaluated.about, output)
    return Tested(fewshot_results.markdown(results), fewshot_results.scores(results))
