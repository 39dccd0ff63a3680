"""A Selectron language model for transformers: any mixer in any layer; needs torch and transformers alone.

Parameters are called as in Selectron's own checkpoints. Suffixes: b batch, t position, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .attention_selectron import NSA, Attention, MoBA, Top1Chunk, Top1Element
from .cache_selectron import Beginning, RowGroup, SelectronCache, group_rows, padding_of
from .configuration_selectron import SelectronConfig
from .mamba_selectron import Mamba, Mamba2
from .mixer_selectron import Mixer, Positions
from .rwkv_selectron import RWKV6, RWKV7, ShiftedNorm
from .stateful_selectron import GLA, Based, DeltaNet, GatedDeltaNet, LinearAttention, RetNet

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "top1_element": Top1Element,
    "top1_chunk": Top1Chunk,
    "moba": MoBA,
    "nsa": NSA,
    "linear_attention": LinearAttention,
    "retnet": RetNet,
    "gla": GLA,
    "based": Based,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
}

LOSS_ARGUMENTS = {"num_items_in_batch", "ignore_index", "shift_labels"}


def _norm(config: SelectronConfig) -> nn.Module:
    kind = nn.RMSNorm if config.normalization == "rms_norm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_epsilon)


class SelectronMLP(nn.Module):
    """Feed-forward: SwiGLU, or RWKV-7's two matrices with a squared ReLU between."""

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None, "the block has a feed-forward"
        self.gated = config.block == "transformer"
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size * (1 + self.gated), bias=False)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_bth: Tensor) -> Tensor:
        """[b, t, h] to the same shape."""
        x = self.linear_fc1(x_bth)
        if self.gated:
            gate, value = x.chunk(2, -1)
            x = F.silu(gate) * value
        else:
            x = F.relu(x).square()
        projected: Tensor = self.linear_fc2(x)
        return projected


class SelectronLayer(GradientCheckpointingLayer):
    """Norm, mixer, residual, and unless the block is the mixer alone norm, feed-forward, residual.

    Args:
        config: of the model.
        index: 0 for the first layer.
    """

    def __init__(self, config: SelectronConfig, index: int) -> None:
        super().__init__()
        name = config.layer_mixers[index]
        if name not in MIXERS:
            raise ValueError(f"layer_mixers names {name!r}: give some of {sorted(MIXERS)}")
        self.self_attention = MIXERS[name](config, name, index + 1)
        shifts = config.block == "rwkv7"
        self.input_layernorm = self._maybe_shifted(config, shifts and not self.self_attention.shifts_tokens)
        self.has_mlp = config.block != "mixer"
        if self.has_mlp:
            self.pre_mlp_layernorm = self._maybe_shifted(config, shifts)
            self.mlp = SelectronMLP(config)

    @staticmethod
    def _maybe_shifted(config: SelectronConfig, shifted: bool) -> nn.Module:
        norm = _norm(config)
        return ShiftedNorm(norm, config.hidden_size) if shifted else norm

    def forward(self, x_bth: Tensor, past: Beginning, positions: Positions) -> Tensor:
        """[b, t, h] to the same shape; see `Mixer.forward`."""
        normed = _normed(self.input_layernorm, x_bth, past, "before_mixer")
        x_bth = x_bth + self.self_attention(normed, past, positions)
        if not self.has_mlp:
            return x_bth
        x: Tensor = x_bth + self.mlp(_normed(self.pre_mlp_layernorm, x_bth, past, "before_mlp"))
        return x


def _normed(norm: nn.Module, x_bth: Tensor, past: Beginning, name: str) -> Tensor:
    normed: Tensor = norm(x_bth, past, name) if isinstance(norm, ShiftedNorm) else norm(x_bth)
    return normed


class SelectronEmbedding(nn.Module):
    """Embedding of tokens, and of positions where a mixer asks for a learned table."""

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__()
        self.word_embeddings: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.learns_positions:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)


class SelectronDecoder(nn.Module):
    """All layers and the last norm."""

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelectronLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_layernorm = _norm(config)

    def forward(self, x_bth: Tensor, past: Sequence[Beginning], positions: Positions) -> list[Tensor]:
        """The hidden states before each layer and after the last norm, [b, t, h] each."""
        states = [x_bth]
        for layer, before in zip(self.layers, past, strict=True):
            states.append(layer(states[-1], before, positions))
        states[-1] = self.final_layernorm(states[-1])
        return states


class SelectronForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model; rows of a batch may be padded on the left.

    Args:
        config: of the model.
    """

    config: SelectronConfig
    config_class = SelectronConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["SelectronLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past", "past_key_values"]  # noqa: RUF012
    _tied_weights_keys = {"output_layer.weight": "embedding.word_embeddings.weight"}  # noqa: RUF012
    # A state cannot give tokens back: transformers refuses assisted generation by this.
    _is_stateful = True

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__(config)
        self.embedding = SelectronEmbedding(config)
        self.decoder = SelectronDecoder(config)
        self.output_layer: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # The first call makes a `SelectronCache`, which has states too, and knows the padding.
        return False

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.embedding.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.output_layer

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer."""
        self.output_layer = new_embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Plain initial weights, for those that no checkpoint gives; Selectron's training begins its own way."""
        for name, parameter in module.named_parameters(recurse=False):
            is_norm = "norm" in name or isinstance(module, nn.RMSNorm | nn.LayerNorm)
            if name.endswith("bias"):
                init.zeros_(parameter)
            elif is_norm:
                init.ones_(parameter)
            else:
                init.normal_(parameter, 0.0, self.config.initializer_range)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SelectronCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of what follows each token.

        Args:
            input_ids: tokens [b, t]; this or `inputs_embeds`.
            attention_mask: 1 for tokens and 0 for padding, [b, columns seen and given]; None: no padding. Positions are
                counted from a row's first token.
            past_key_values: what was seen before, from an earlier call with `use_cache`.
            inputs_embeds: embeddings of tokens [b, t, hidden].
            labels: tokens to be predicted [b, t], shifted inside; -100 is left out.
            use_cache: whether to remember what is given; None: as the configuration says, and not in training.
            output_hidden_states: whether to return them before each layer and after the last norm.
            logits_to_keep: of how many last tokens, or of which, logits are wanted; 0: all.
            more: arguments of the loss.

        Returns:
            Logits [b, t, v], the loss where there are labels, the cache where it is used.

        Raises:
            ValueError: an argument does not fit.
        """
        _refuse_unknown(more)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_bth = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(x_bth, attention_mask, past_key_values, use_cache)
        states = self._hidden_states(x_bth, attention_mask, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_btv = self.output_layer(states[-1][:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_btv, labels=labels, vocab_size=self.config.vocab_size, **more)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_btv,
            past_key_values=cache,
            hidden_states=tuple(states) if wants_states else None,
        )

    def _cache(
        self, x_bth: Tensor, mask_bs: Tensor | None, past: SelectronCache | None, use_cache: bool | None
    ) -> SelectronCache | None:
        """The cache that this call goes on with; None: it remembers nothing."""
        if past is not None and not isinstance(past, SelectronCache):
            raise ValueError(f"past_key_values is a {type(past).__name__}: give what an earlier call has returned")
        recomputes = self.training and self.is_gradient_checkpointing
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if not (use_cache or past is not None):
            return None
        if recomputes:
            raise ValueError("a cache would be written twice with gradient checkpointing: set use_cache=False")
        columns = x_bth.shape[1] + (past.num_columns if past is not None else 0)
        padding = _padding(mask_bs, x_bth.shape[0], columns, may_end_early=False)
        if past is None:
            return SelectronCache(padding, self.config.num_hidden_layers)
        if past.batch_size != x_bth.shape[0] or (mask_bs is not None and padding != past.padding):
            raise ValueError("past_key_values is of other rows: attention_mask and the batch must go on as they began")
        return past

    def _hidden_states(self, x_bth: Tensor, mask_bs: Tensor | None, cache: SelectronCache | None) -> list[Tensor]:
        """See `SelectronDecoder.forward`; zeros where there is padding."""
        b, t, _ = x_bth.shape
        if cache is not None:
            seen, groups = cache.num_columns, cache.groups
            cache.num_columns += t
        else:
            seen, groups = 0, group_rows(_padding(mask_bs, b, t, may_end_early=True))
            for group in groups:
                group.layers = [Beginning()] * self.config.num_hidden_layers
        if len(groups) == 1 and groups[0].padding <= seen:
            return self._of_group(x_bth, groups[0], seen)
        states = [torch.zeros_like(x_bth) for _ in range(self.config.num_hidden_layers + 1)]
        for group in groups:
            rows, start = torch.tensor(group.rows, device=x_bth.device), max(group.padding - seen, 0)
            for whole, part in zip(states, self._of_group(x_bth[rows, start:], group, seen + start), strict=True):
                whole[rows, start:] = part
        return states

    def _of_group(self, x_bth: Tensor, group: RowGroup, column: int) -> list[Tensor]:
        """See `SelectronDecoder.forward`: rows with equally much padding, from a column on, which is a token's."""
        positions = Positions(column - group.padding, x_bth.shape[1], self.config)
        if self.config.learns_positions:
            end, table = positions.first + positions.count, self.embedding.position_embeddings
            if end > table.num_embeddings:
                raise ValueError(
                    f"the sequence has {end} tokens, and the learned position table {table.num_embeddings}: shorten it"
                )
            x_bth = x_bth + table(torch.arange(positions.first, end, device=x_bth.device))
        states: list[Tensor] = self.decoder(x_bth, group.layers, positions)
        return states


def _padding(mask_bs: Tensor | None, rows: int, columns: int, *, may_end_early: bool) -> list[int]:
    """See `padding_of`; no mask: no padding."""
    if mask_bs is None:
        return [0] * rows
    if tuple(mask_bs.shape) != (rows, columns):
        raise ValueError(f"attention_mask has shape {list(mask_bs.shape)}: give [{rows}, {columns}], what was seen too")
    return padding_of(mask_bs, may_end_early=may_end_early)


def _refuse_unknown(more: dict[str, Any]) -> None:
    """Arguments that would change nothing, though their callers rely on them."""
    for name in set(more) - LOSS_ARGUMENTS:
        if more.pop(name) not in (None, False):
            raise ValueError(f"{name} is not known to this model: leave it out")
