"""Evaluation suites: each tests a model under any layout, writes its results and returns its scores."""

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
from megatron_ext.data.datasets import open_evaluation_data, packing_from_config
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses, write_domains
from megatron_ext.evaluation.domains import DomainEvaluator, EvaluationDomain, evaluation_domains
from megatron_ext.evaluation.fewshot import results as fewshot_results
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.run import check_fewshot, evaluate_fewshot
from megatron_ext.evaluation.language_model import ParallelTextModel
from megatron_ext.evaluation.retrieval import report as retrieval_results
from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.run import check_retrieval, evaluate_retrieval
from megatron_ext.evaluation.token_classes.building import ClassifierSource
from megatron_ext.evaluation.token_classes.results import write_classes
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.forward_backward import TokenLosses
from megatron_ext.parallel.first_rank import print_on_first_rank
from megatron_ext.platform.device import Platform
from megatron_ext.run_folder.layout import EVALUATIONS, step_name
from megatron_ext.runs.tokenizer import RunTokenizer
from megatron_ext.utils.atomic_files import is_url, os_error_reason
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import path_within

MULTIPLE = 64
"""Sequence lengths are padded to a multiple of this, so that kernels are tuned and compiled for few shapes."""


@dataclass(frozen=True)
class EvalContext:
    """Model to evaluate.

    Attributes:
        config: configuration of its run, with the layout of `groups`.
        name: name of the run folder.
        progress: steps, samples and tokens that it was trained for.
        tokenizer_sha256: digest of the training data's tokenizer; None: unknown.
        tokenizer: tokenizer of the run.
        chunks: model chunks of this rank.
        groups: process groups.
        platform: device and backend of this process.
    """

    config: RunConfig
    name: str
    progress: Progress
    tokenizer_sha256: str | None
    tokenizer: RunTokenizer
    chunks: Sequence[MegatronModule]
    groups: ProcessGroupCollection
    platform: Platform

    @property
    def about(self) -> dict[str, Any]:
        """Identification of the model in results: run, step and tokens."""
        return {"run": self.name, "step": self.progress.step, "tokens": self.progress.tokens}

    def token_losses(self) -> TokenLosses:
        """Return an evaluator of per-token losses, with the run's sequence length and micro-batch size."""
        data, training = self.config.data, self.config.training
        sizes = data.seq_length, training.micro_batch_size
        return TokenLosses(self.chunks, self.groups, self.platform, *sizes, reset_attention=data.reset_attention)

    def language_model(self) -> ParallelTextModel:
        """Return the model together with its tokenizer."""
        longest = self.config.model.max_position_embeddings
        assert longest is not None, "derived by the configuration"
        return ParallelTextModel(
            self.chunks,
            self.tokenizer,
            self.groups,
            self.platform,
            max_length=longest,
            micro_batch_size=self.config.training.micro_batch_size,
            multiple=_multiple(self.config),
        )


def _multiple(config: RunConfig) -> int:
    """Return the multiple to pad sequence lengths to, so that the layout can split them."""
    parallel, known = config.parallel, load_all()
    ranks = parallel.context * (parallel.tensor if sequence_parallel(config) else 1)
    mixers = {name: config.mixers.get(name, {}) for name in parse_pattern(config.model.pattern)}
    sizes = [fetched_chunk_size(known[name], fields) or 1 for name, fields in mixers.items()]
    return math.lcm(MULTIPLE, ranks, *(parallel.context * size for size in sizes if parallel.context > 1))


@dataclass(frozen=True)
class SuiteResult:
    """Results of a suite, on the first rank.

    Attributes:
        summary: Markdown table.
        scores: scores by name, as in the records of `suites.jsonl`.
    """

    summary: str
    scores: dict[str, float]


Test = Callable[[EvalContext, Any, Path], SuiteResult | None]
"""Function that evaluates a model with the suite's options. The first rank writes the results to the folder and returns
them, the other ranks return None.
"""


Check = Callable[[EvalContext, Any], None]
"""Function that raises a UserError for options that the suite's test would reject, given tokenizer, files and layout.
It computes nothing, so the model's chunks may be missing.
"""


def results_folder(run: Path, step: int) -> Path:
    """Return the default folder for results of a run's step."""
    return path_within(run, f"{EVALUATIONS}/{step_name(step)}", str(run))


def make_folder(folder: Path) -> None:
    """Create a folder for results.

    Raises:
        UserError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        action = "written to" if folder.is_dir() else "created"
        raise UserError(
            str(folder), f"cannot be {action} ({os_error_reason(error)})", "choose another --output"
        ) from error


def domains(context: EvalContext, options: DomainOptions, output: Path) -> SuiteResult | None:
    """Evaluate the loss by domain; see `Test`. `check_domains` has already compared the text's sha256."""
    config, progress = context.config, context.progress
    data = config.data
    source, domains_to_evaluate = _open_domains(context, options, replace(data, verify="size"))
    evaluator = DomainEvaluator(
        context.token_losses(),
        domains_to_evaluate,
        config.training.micro_batch_size,
        packing_from_config(data),
        shows_progress=True,
        class_source=source,
    )
    records = evaluator.evaluate(progress.step, progress.tokens, by_class=options.classes)
    losses = domain_losses(
        records,
        source.manifest,
        options,
        lambda index: context.tokenizer.count_bytes(domains_to_evaluate[index].samples.first_tokens().tolist()),
    )
    if dist.get_rank() != 0:
        return None
    summary = write_domains(losses, options, context.about, output)
    if any("classes" in record for record in records):
        summary += "\n" + write_classes(records, options.confidence, context.about, output)
    return SuiteResult(summary, {f"{loss.split}/{loss.domain}": loss.loss for loss in losses})


def check_domains(context: EvalContext, options: DomainOptions) -> None:
    """Reject data that is missing, damaged or from another tokenizer; see `Check`. A collective call."""
    for line in options.warnings():
        print_on_first_rank(line)
    _open_domains(context, options, context.config.data)


def _open_domains(
    context: EvalContext, options: DomainOptions, data: DataConfig
) -> tuple[ClassifierSource, list[EvaluationDomain]]:
    root, manifest, train, test = open_evaluation_data(data)
    _check_tokenizer(context, manifest)
    source = ClassifierSource(
        root=root,
        manifest=manifest,
        train_domains=train,
        load_tokenizer=lambda: context.tokenizer,
        seq_length=data.seq_length,
        device=context.platform.device,
        counts_training=not is_url(data.path),
    )
    return source, evaluation_domains(root, manifest, train, test, data.seq_length, options.sequences)


def _check_tokenizer(context: EvalContext, manifest: Manifest) -> None:
    if context.tokenizer_sha256 not in (None, manifest.tokenizer.sha256):
        problem = f"{context.config.data.path} was tokenized with another tokenizer than that of {context.name}"
        raise UserError("data.path", problem, "prepare the data with the tokenizer in the run's folder")


def retrieval(context: EvalContext, options: RetrievalOptions, output: Path) -> SuiteResult | None:
    """Evaluate retrieval from the context; see `Test`."""
    results = evaluate_retrieval(context.language_model(), options)
    if dist.get_rank() != 0:
        return None
    retrieval_results.write_results(results, context.about, output)
    scores = {f"{summary.task}/{summary.length}": summary.score for summary in results.by_length()}
    return SuiteResult(retrieval_results.markdown(results), scores)


def check_retrieval_options(context: EvalContext, options: RetrievalOptions) -> None:
    """Reject lengths that do not fit and a haystack that cannot be read; see `Check`."""
    check_retrieval(context.language_model(), options)


def check_fewshot_options(context: EvalContext, options: FewshotOptions) -> None:
    """Reject tasks that cannot be loaded; see `Check`."""
    check_fewshot(options, context.language_model().max_length)


def fewshot(context: EvalContext, options: FewshotOptions, output: Path) -> SuiteResult | None:
    """Evaluate few-shot tasks with lm-eval; see `Test`."""
    results = evaluate_fewshot(context.language_model(), options)
    if results is None:
        return None
    fewshot_results.write_results(results, context.about, output)
    return SuiteResult(fewshot_results.markdown(results), fewshot_results.scores(results))
