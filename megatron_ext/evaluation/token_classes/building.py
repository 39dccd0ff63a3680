"""Construction of a run's token classifier from its tokenizer and its training text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from data_prep.manifest import Manifest
from megatron_ext.data.token_counts import sample_token_counts
from megatron_ext.evaluation.token_classes.classifier import TokenClassifier
from megatron_ext.evaluation.token_classes.vocabulary import token_table
from megatron_ext.parallel.agreement import raise_on_all_ranks
from megatron_ext.parallel.first_rank import print_on_first_rank
from megatron_ext.runs.tokenizer import RunTokenizer
from megatron_ext.utils.errors import UserError


@dataclass(frozen=True)
class ClassifierSource:
    """Source of a token classifier, which is built on first use.

    Attributes:
        root: folder of the prepared data.
        manifest: manifest of that folder.
        train_domains: training domains, whose text determines rare and frequent tokens.
        load_tokenizer: returns the tokenizer of the data.
        seq_length: tokens per window.
        device: device of the process group's tensors.
        counts_training: False to leave out the classes of rare and frequent tokens, without reading training text.
    """

    root: Path
    manifest: Manifest
    train_domains: Sequence[str]
    load_tokenizer: Callable[[], RunTokenizer]
    seq_length: int
    device: torch.device
    counts_training: bool = True

    @cached_property
    def classifier(self) -> TokenClassifier | None:
        """Classifier, the same on all ranks; its first use is a collective call.

        A run must not fail at its last evaluation because a file is gone that training does not need. None: the
        tokenizer cannot be read. If the training text cannot be read, the classes of rare and frequent tokens are
        missing. There is a warning in both cases.
        """
        loaded: list[RunTokenizer] = []
        try:
            raise_on_all_ranks(lambda: loaded.append(self.load_tokenizer()))
        except UserError as error:
            print_on_first_rank(f"selectron: warning: {error.where}: {error.problem}; no losses by class of token")
            return None
        entry = self.manifest.tokenizer
        texts = loaded[0].token_texts(entry.vocab_size)
        return TokenClassifier(token_table(texts, loaded[0].special_ids, entry.eos_id, self._counts()), self.seq_length)

    def _counts(self) -> npt.NDArray[np.int64] | None:
        if not self.counts_training:
            return None
        rank, world_size = dist.get_rank(), dist.get_world_size()
        share = sample_token_counts(self.root, self.manifest, self.train_domains, rank, world_size)
        total = torch.zeros(self.manifest.tokenizer.vocab_size + 1, dtype=torch.int64, device=self.device)
        if share is None:
            total[-1] = 1  # number of ranks that failed
        else:
            total[:-1] = torch.from_numpy(share)
        dist.all_reduce(total)
        if int(total[-1]) or not int(total.sum()):
            print_on_first_rank(
                "selectron: warning: the training text cannot be read; losses of rare and frequent tokens are left out"
            )
            return None
        return total[:-1].cpu().numpy()
