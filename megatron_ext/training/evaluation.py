"""What `selectron evaluate` does: a trained run's model is put to the tests of some suites, under any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from tokenizers import Tokenizer

from data_prep.manifest import Manifest, load_manifest
from megatron_ext.config.rules import check
from megatron_ext.errors import UserError
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses, write_domains
from megatron_ext.evaluation.domains import DomainEvaluator, evaluation_domains
from megatron_ext.evaluation.fewshot import results as fewshot
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.run import evaluate_fewshot
from megatron_ext.evaluation.language_model import LanguageModel
from megatron_ext.evaluation.retrieval import report as retrieval
from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.run import evaluate_retrieval
from megatron_ext.evaluation.token_losses import TokenLosses
from megatron_ext.mixers.registry import load_all
from megatron_ext.parallel.agreement import on_every_rank
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform import start_process_group
from megatron_ext.training.datasets import packing_of
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
        run: whose model it is.
        chunks: of it on this rank.
        groups: arranged as the run's layout says.
    """

    run: TrainedRun
    chunks: Sequence[MegatronModule]
    groups: ProcessGroupCollection

    def token_losses(self) -> TokenLosses:
        """Losses of tokens, in samples as the run was trained on."""
        data, training = self.run.config.data, self.run.config.training
        sizes = data.seq_length, training.micro_batch_size
        return TokenLosses(self.chunks, self.groups, self.run.platform, *sizes, reset_attention=data.reset_attention)

    def language_model(self) -> LanguageModel:
        """The model with its tokenizer."""
        config, longest = self.run.config, self.run.shape.model.max_position_embeddings
        assert longest is not None, "derived"
        return LanguageModel(
            self.chunks,
            _Coder(self.run),
            self.groups,
            self.run.platform,
            max_length=longest,
            micro_batch_size=config.training.micro_batch_size,
            multiple=_multiple(self.run),
        )


class _Coder:
    """The run's tokenizer: as in training, text cannot end a document."""

    def __init__(self, run: TrainedRun) -> None:
        kept = run.tokenizer
        if kept.end_id is None:
            mend = "name it as eos_token in the run's tokenizer_config.json"
            raise UserError(str(kept.file), "nothing says which token ends a document", mend)
        self.end_id, self.size = kept.end_id, kept.size
        self._tokenizer = Tokenizer.from_file(str(kept.file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def _multiple(run: TrainedRun) -> int:
    """What lengths must be multiples of, so that the layout can cut them."""
    parallel = run.config.parallel
    ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    traits = load_all()
    chunks = [
        getattr(run.shape.mixer_configs[name], traits[name].chunk_field or "", 1) for name in set(run.shape.mixers)
    ]
    return math.lcm(MULTIPLE, ranks, *(parallel.context * chunk for chunk in chunks if parallel.context > 1))


Suite = Callable[[Evaluated, Any, Path], str]
"""Tests a model with the suite's own options, writes results into a folder on the first rank, returns a summary."""


def evaluate(
    folder: Path, suites: Mapping[str, Any], *, step: int | None, overrides: Sequence[str], output: Path | None
) -> None:
    """Evaluate as one rank of the world that the environment describes.

    Args:
        folder: of the run.
        suites: options of those that are asked for, by name, see `SUITES`.
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
        evaluated = Evaluated(run, trained_chunks(run, groups), groups)
        output = output or run.folder / "evaluation" / f"step_{run.record.progress.step}"
        on_every_rank(lambda: _make(output))
        for name, options in suites.items():
            said = SUITES[name](evaluated, options, output)
            if dist.get_rank() == 0:
                print(said)
    finally:
        dist.destroy_process_group()


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


def _domains(evaluated: Evaluated, options: DomainOptions, output: Path) -> str:
    run = evaluated.run
    data, progress, root = run.config.data, run.record.progress, Path(run.config.data.path)
    manifest = load_manifest(root)
    _check_tokens(run, manifest)
    domains = evaluation_domains(
        root, manifest, data.train_domains, data.test_domains, data.seq_length, options.sequences
    )
    evaluator = DomainEvaluator(
        evaluated.token_losses(), domains, run.config.training.micro_batch_size, packing_of(data)
    )
    losses = domain_losses(evaluator.evaluate(progress.step, progress.tokens), manifest, options)
    if dist.get_rank() != 0:
        return ""
    return write_domains(losses, {**_about(run), "options": asdict(options)}, output)


def _check_tokens(run: TrainedRun, manifest: Manifest) -> None:
    if run.record.identity.get("data.tokenizer") not in (None, manifest.tokenizer.sha256):
        problem = f"{run.config.data.path} was made with another tokenizer than {run.folder}"
        raise UserError("data.path", problem, "prepare the data with the run's tokenizer.json")


def _about(run: TrainedRun) -> dict[str, Any]:
    """Which model it was."""
    progress = run.record.progress
    return {"run": run.folder.name, "step": progress.step, "tokens": progress.tokens}


def _retrieval(evaluated: Evaluated, options: RetrievalOptions, output: Path) -> str:
    results = evaluate_retrieval(evaluated.language_model(), options)
    if dist.get_rank() != 0:
        return ""
    retrieval.write_results(results, _about(evaluated.run), output)
    return retrieval.markdown(results)


def _fewshot(evaluated: Evaluated, options: FewshotOptions, output: Path) -> str:
    results = evaluate_fewshot(evaluated.language_model(), options)
    if results is None:
        return ""
    fewshot.write_results(results, _about(evaluated.run), output)
    return fewshot.markdown(results)


SUITES: dict[str, Suite] = {"domains": _domains, "retrieval": _retrieval, "fewshot": _fewshot}
