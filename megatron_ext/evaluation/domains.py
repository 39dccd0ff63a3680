"""Loss by domain: held-out text of the training domains, and in-domain and out-of-domain test text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.manifest import Manifest
from megatron_ext.data.batches import NO_PACKING, Batch, Packing, evaluation_batch, micro_batch_indices
from megatron_ext.data.samples import PADDING_DOCUMENT, EvaluationSamples
from megatron_ext.data.shards import TokenStore
from megatron_ext.evaluation.domain_results import MANIFEST_SPLITS
from megatron_ext.evaluation.progress import progress
from megatron_ext.evaluation.token_classes.building import ClassifierSource
from megatron_ext.evaluation.token_classes.sums import ClassSums
from megatron_ext.model.forward_backward import TokenLosses


@dataclass(frozen=True)
class EvaluationDomain:
    """Domain to evaluate on.

    Attributes:
        name: name of the domain.
        split: `validation` (text of a training domain, held out by folder or by hash), `test` (a domain that is not
            trained on) or `test_in_domain` (text of a training domain in a folder `test`).
        samples: windows of `seq_length` tokens.
        num_documents: number of documents of the whole domain, evaluated or not.
    """

    name: str
    split: str
    samples: EvaluationSamples
    num_documents: int


def evaluation_domains(
    root: Path,
    manifest: Manifest,
    train_domains: Sequence[str],
    test_domains: Sequence[str],
    seq_length: int,
    max_sequences: int,
) -> list[EvaluationDomain]:
    """Return the domains to evaluate on: validation text of training domains, and test text of test domains.

    Args:
        root: folder of the prepared data.
        manifest: manifest of that folder.
        train_domains: names of the training domains in the manifest. Domains without validation text are skipped.
        test_domains: names of the test domains in the manifest. A domain that is also trained on gets the split
            `test_in_domain`.
        seq_length: tokens per window.
        max_sequences: maximum number of windows per domain; 0: all windows.
    """
    held_out = manifest.domain_names("validation")
    names_by_split = {
        "validation": [name for name in train_domains if name in held_out],
        "test_in_domain": [name for name in test_domains if name in train_domains],
        "test": [name for name in test_domains if name not in train_domains],
    }
    domains = []
    for split, names in names_by_split.items():
        for name in names:
            store = TokenStore(root, manifest, MANIFEST_SPLITS[split], [name])
            samples = EvaluationSamples(store, seq_length, max_sequences)
            domains.append(EvaluationDomain(name, split, samples, store.num_documents))
    return domains


class DomainEvaluator:
    """Evaluator of a model on domains. The samples are divided over data-parallel ranks.

    Args:
        model: model that computes the loss of each token.
        domains: domains to evaluate on.
        micro_batch_size: samples per forward pass.
        packing: document information in the batches, the same as in training.
        shows_progress: True if the first rank shows a progress line on standard error.
        class_source: source of the classes of tokens, for evaluations by class.
    """

    def __init__(
        self,
        model: TokenLosses,
        domains: Sequence[EvaluationDomain],
        micro_batch_size: int,
        packing: Packing = NO_PACKING,
        *,
        shows_progress: bool = False,
        class_source: ClassifierSource | None = None,
    ) -> None:
        self._packing = packing
        self._model, self._domains, self._micro_batch_size = model, domains, micro_batch_size
        self._shows_progress, self._class_source = shows_progress, class_source

    def evaluate(self, step: int, tokens: int, *, by_class: bool = False) -> list[dict[str, Any]]:
        """Evaluate all domains.

        Args:
            step: number of completed optimizer steps.
            tokens: number of consumed training tokens.
            by_class: True to sum the losses by class of token, too. Requires a source of classes.

        Returns:
            One record per domain in the format of `evaluation.jsonl`, the same on every rank. Fields: step, tokens,
            domain, split, loss (nats per predicted token), num_tokens (predicted), documents (indices within the
            domain), document_loss (sum of nats of each document), document_tokens (predicted tokens of each document)
            and first_tokens (labels that are excluded because they begin a document, see `Packing.within_documents`).
            With `by_class` also `classes`: by name of the class, document_loss and document_tokens of its tokens.
        """
        return [{"step": step, "tokens": tokens, **self._evaluate_domain(domain, by_class)} for domain in self._domains]

    def _evaluate_domain(self, domain: EvaluationDomain, by_class: bool) -> dict[str, Any]:
        sums = torch.zeros(3, domain.num_documents, dtype=torch.float64)
        class_sums = None
        if by_class:
            assert self._class_source is not None, "evaluator without a source of classes"
            classifier = self._class_source.classifier
            class_sums = None if classifier is None else ClassSums(classifier, domain.samples)
        for rows in progress(
            self._rounds(domain), domain.name, "round", total=self._num_rounds(domain), is_shown=self._shows_progress
        ):
            batches = [self._batch(domain, indices) for indices in rows]
            for indices, batch, losses_bt in zip(rows, batches, self._model.losses(batches), strict=False):
                self._add(sums, class_sums, indices, batch, losses_bt)
        loss, count, first = self._model.reduce(sums)
        evaluated = torch.nonzero(count).flatten()
        classes = {}
        if class_sums is not None:
            classes["classes"] = class_sums.record(self._model.reduce(class_sums.dense(evaluated.numpy())))
        return {
            "domain": domain.name,
            "split": domain.split,
            "loss": float(loss.sum() / count.sum()),
            "num_tokens": int(count.sum()),
            "documents": evaluated.tolist(),
            "document_loss": [round(value, 4) for value in loss[evaluated].tolist()],
            "document_tokens": count[evaluated].to(torch.int64).tolist(),
            "first_tokens": int(first.sum()),
            **classes,
        }

    def _num_rounds(self, domain: EvaluationDomain) -> int:
        groups = self._model.groups
        micro_batches = -(-len(domain.samples) // (self._micro_batch_size * groups.dp.size()))
        return -(-micro_batches // groups.pp.size())

    def _rounds(self, domain: EvaluationDomain) -> Iterator[list[range]]:
        """Yield the samples of this rank's micro-batches in lists, one for each run of the pipeline schedule.

        All ranks have equally many micro-batches. Missing samples at the end are padding.
        """
        groups, size = self._model.groups, self._micro_batch_size
        dp_rank, dp_size = groups.dp.rank(), groups.dp.size()
        per_round = groups.pp.size()  # an interleaved schedule needs a multiple of this number of micro-batches
        for first in range(0, -(-len(domain.samples) // (size * dp_size)), per_round):
            yield [
                micro_batch_indices(0, micro_batch, size, dp_rank, dp_size)
                for micro_batch in range(first, first + per_round)
            ]

    def _batch(self, domain: EvaluationDomain, indices: range) -> Batch:
        cp = self._model.groups.cp
        return evaluation_batch(domain.samples, indices, cp.rank(), cp.size(), self._packing)

    def _add(
        self,
        sums: torch.Tensor,
        class_sums: ClassSums | None,
        indices: range,
        batch: Batch,
        losses_bt: torch.Tensor,
    ) -> None:
        """Add a batch to the sums.

        Args:
            sums: float64 [3, documents]: sum of losses, number of counted labels, number of excluded labels. Modified
                in place.
            class_sums: sums by class, or None.
            indices: samples of the batch.
            batch: batch with document ids.
            losses_bt: losses of the batch.
        """
        assert batch.document_ids is not None
        is_label = batch.loss_mask.bool()
        documents = batch.document_ids[is_label].numpy()
        excluded = batch.document_ids[(batch.document_ids != PADDING_DOCUMENT) & ~is_label].numpy()
        weights = losses_bt[is_label].double().numpy()
        sums[0] += torch.from_numpy(np.bincount(documents, weights, minlength=sums.shape[1]))
        for row, counted in ((1, documents), (2, excluded)):
            sums[row] += torch.from_numpy(np.bincount(counted, minlength=sums.shape[1]).astype(np.float64))
        if class_sums is not None:
            first = self._model.groups.cp.rank() * is_label.shape[1]
            class_sums.add(indices, first, is_label, documents, weights)
