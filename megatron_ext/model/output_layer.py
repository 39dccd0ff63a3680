"""Output layer of a language model that computes losses from labels without materialising all logits."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from kernels.linear_cross_entropy import linear_cross_entropy


class LossOutputLayer(ColumnParallelLinear):
    """Megatron's output layer, sharded over the vocabulary, with an integrated loss.

    The loss is part of the layer because DeepSpeed's stage 3 gathers a weight only for the module that owns it.

    Attributes:
        num_tokens: tokens of the vocabulary. Later rows, over all ranks, are padding: they get no probability and no
            gradient.
    """

    num_tokens: int

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels_bt: Tensor | None = None,
        loss_mask_bt: Tensor | None = None,
    ) -> Any:
        """Compute logits as Megatron does, or losses if there are labels.

        Args:
            input_: hidden states [t, b, h]; with sequence parallelism this rank's shard of t.
            weight: [v / tp, h], the embedding's weight if it is shared; None: the layer's own.
            runtime_gather_output: as in Megatron, for logits.
            labels_bt: [b, t] int64; None: compute logits.
            loss_mask_bt: [b, t], 0 where the loss gets no gradient, see `linear_cross_entropy`; None: all ones.

        Returns:
            Losses [b, t] in nats, fp32. Without labels the result of Megatron's layer: logits of all rows, padding
            included.
        """
        if labels_bt is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight_vh = self.weight if weight is None else weight
        if self.sequence_parallel:
            hidden_tbh = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            hidden_tbh = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        first_label = self.tp_group.rank() * len(weight_vh)
        # No transposition of hidden states: Megatron's all-reduce skips a gradient that is not contiguous.
        losses_tb = linear_cross_entropy(
            hidden_tbh,
            weight_vh,
            labels_bt.T,
            None if loss_mask_bt is None else loss_mask_bt.T.bool(),
            first_label=first_label,
            num_columns=min(max(self.num_tokens - first_label, 0), len(weight_vh)),
            group=self.tp_group,
        )
        return losses_tb.T.contiguous()


class LanguageModel(GPTModel):
    """Megatron's GPT with losses from `LossOutputLayer`.

    Args:
        num_tokens: tokens of the vocabulary, at most Megatron's `vocab_size`, which includes padding rows.
    """

    def __init__(self, *args: Any, num_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            # Megatron hard-codes the class of its output layer; its parameters and checkpoint format stay the same.
            self.output_layer.__class__ = LossOutputLayer
            self.output_layer.num_tokens = num_tokens

    def _postprocess(
        self, hidden_states: Tensor, *, labels: Tensor | None, loss_mask: Tensor | None = None, **others: Any
    ) -> Tensor:
        if not self.post_process or labels is None:
            unchanged: Tensor = super()._postprocess(hidden_states, labels=labels, loss_mask=loss_mask, **others)
            return unchanged
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        losses_bt: Tensor = self.output_layer(hidden_states, weight, labels_bt=labels, loss_mask_bt=loss_mask)
        return losses_bt
