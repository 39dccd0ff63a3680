"""What `selectron evaluate` does: a trained run's model is put to the tests of some suites, under any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from data_prep.manifest import Manifest, load_manifest
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.rules import check
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.traits import fetched_chunk_size
from megatron_ext.errors import UserError
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses, write_domains
from megatron_ext.evaluation.domains import DomainEvaluator, evaluation_domains
from megatron_ext.evaluation.fewshot import results as fewshot_results
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.run import evaluate_fewshot
from megatron_ext.evaluation.language_model import LanguageModel
from megatron_ext.evaluation.retrieval import report as retrieval_results
from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.run import evaluate_retrieval
from megatron_ext.evaluation.token_losses import TokenLosses
from megatron_ext.mixers.registry import load_all
from megatron_ext.parallel.agreement import on_every_rank
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform import Platform, start_process_group
from megatron_ext.training.coder import Coder
from megatron_ext.training.suites import SUITES
from megatron_ext.training.trained import TrainedRun, open_run, trained_chunks

MULTIPLE = 64
"""Lengths are padded to a multiple of it: few shapes, for which kernels are chosen and compiled."""


WITHOUT_TRAINING = (
    "optimizer.sharding=none",
    "optimizer.offload=none",
    "optimizer.offload_parameters=none",
    "optimizer.deepspeed=null",
    "training.recompute=none",
)
"""What a run's configuration need not say where nothing is learned, and what it must not stand in the way of."""


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
        return TokenLosses(self.chunks, self.groups, self.platform, data.seq_length, training.micro_batch_size)

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
    ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    mixers = {name: config.mixers.get(name, {}) for name in parse_pattern(config.model.pattern)}
    sizes = [fetched_chunk_size(traits[name], fields) or 1 for name, fields in mixers.items()]
    return math.lcm(MULTIPLE, ranks, *(parallel.context * size for size in sizes if parallel.context > 1))


Test = Callable[[Evaluated, Any, Path], str]
"""Tests a model with the suite's own options, writes results into a folder on the first rank, returns a summary."""


def evaluate(
    folder: Path, suites: Mapping[str, Any], *, step: int | None, overrides: Sequence[str], output: Path | None
) -> None:
    """Evaluate as one rank of the world that the environment describes.

    Args:
        folder: of the run.
        suites: options of those that are asked for, by name, see `training.suites`.
        step: of the checkpoint; None: the newest.
        overrides: of the run's configuration.
        output: for the results; None: `evaluation/step_N` in the run's folder.

    Raises:
        UserError: the run, its data, the layout or an option is not what it must be.
    """
    run = open_run(folder, step, [*WITHOUT_TRAINING, *overrides])
    start_process_group(run.platform)
    try:
        _check_layout(run)
        groups = make_process_groups(run.config.parallel, run.seed)
        evaluated = _evaluated(run, groups)
        output = output or run.folder / "evaluation" / f"step_{run.record.progress.step}"
        on_every_rank(lambda: _make(output))
        for name, options in suites.items():
            said = SUITES[name].test()(evaluated, options, output)
            if dist.get_rank() == 0:
                print(said)
    finally:
        dist.destroy_process_group()


def _evaluated(run: TrainedRun, groups: ProcessGroupCollection) -> Evaluated:
    return Evaluated(
        config=run.config,
        name=run.folder.name,
        progress=run.record.progress,
        tokenizer_sha256=run.record.identity.get("data.tokenizer"),
        coder=run.coder,
        chunks=trained_chunks(run, groups),
        groups=groups,
        platform=run.platform,
    )


def _check_layout(run: TrainedRun) -> None:
    """The rules of a training run, with a batch that any number of ranks can share."""
    training = run.config.training
    batch = training.micro_batch_size * dist.get_world_size() * run.config.parallel.pipeline
    config = replace(run.config, training=replace(training, global_batch_size=batch))
    check(config, dist.get_world_size(), load_all())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(str(folder), f"cannot be made ({error.strerror})", "choose another --output") from error


def domains(evaluated: Evaluated, options: DomainOptions, output: Path) -> str:
    """Loss by domain; see `Test`."""
    config, progress = evaluated.config, evaluated.progress
    data, root = config.data, Path(config.data.path)
    manifest = load_manifest(root)
    _check_tokens(evaluated, manifest)
    found = evaluation_domains(
        root, manifest, data.train_domains, data.test_domains, data.seq_length, options.sequences
    )
    evaluator = DomainEvaluator(evaluated.token_losses(), found, config.training.micro_batch_size)
    losses = domain_losses(evaluator.evaluate(progress.step, progress.tokens), manifest, options)
    return write_domains(losses, options, evaluated.about, output) if dist.get_rank() == 0 else ""


def _check_tokens(evaluated: Evaluated, manifest: Manifest) -> None:
    if evaluated.tokenizer_sha256 not in (None, manifest.tokenizer.sha256):
        problem = f"{evaluated.config.data.path} was made with another tokenizer than {evaluated.name}"
        raise UserError("data.path", problem, "prepare the data with the tokenizer in the run's folder")


def retrieval(evaluated: Evaluated, options: RetrievalOptions, output: Path) -> str:
    """What the model finds again in its context; see `Test`."""
    results = evaluate_retrieval(evaluated.language_model(), options)
    if dist.get_rank() != 0:
        return ""
    retrieval_results.write_results(results, evaluated.about, output)
    return retrieval_results.markdown(results)


def fewshot(evaluated: Evaluated, options: FewshotOptions, output: Path) -> str:
    """Tasks of lm-eval; see `Test`."""
    results = evaluate_fewshot(evaluated.language_model(), options)
    if results is None:
        return ""
    fewshot_results.write_results(results, evaluated.about, output)
    return fewshot_results.markdown(results)
