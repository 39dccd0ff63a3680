"""Selectron language model for transformers, with any mixer in any layer.

It requires only torch and transformers. Parameters have the names of Selectron's own checkpoints. Shape suffixes:
b batch, t position, h hidden, v vocabulary.
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
from .cache_selectron import EmptyHistory, RowGroup, SelectronCache, group_rows, left_padding
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
    norm_class = nn.RMSNorm if config.normalization == "rms_norm" else nn.LayerNorm
    return norm_class(config.hidden_size, eps=config.norm_epsilon)


class SelectronMLP(nn.Module):
    """Feed-forward layer: SwiGLU, or the two matrices of RWKV-7 with a squared ReLU between them."""

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None, "the block has a feed-forward layer"
        self.gated = config.block == "transformer"
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size * (1 + self.gated), bias=False)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_bth: Tensor) -> Tensor:
        """Map hidden states [b, t, h] to [b, t, h]."""
        x = self.linear_fc1(x_bth)
        if self.gated:
            gate, value = x.chunk(2, -1)
            x = F.silu(gate) * value
        else:
            x = F.relu(x).square()
        projected: Tensor = self.linear_fc2(x)
        return projected


class SelectronLayer(GradientCheckpointingLayer):
    """Layer of norm, mixer and residual, followed by norm, feed-forward and residual unless the block is `mixer`.

    Args:
        config: configuration of the model.
        index: index of the layer; the first layer is 0.
    """

    def __init__(self, config: SelectronConfig, index: int) -> None:
        super().__init__()
        name = config.layer_mixers[index]
        if name not in MIXERS:
            raise ValueError(f"layer_mixers contains {name!r}: give some of {sorted(MIXERS)}")
        self.self_attention = MIXERS[name](config, name, index + 1)
        has_token_shift = config.block == "rwkv7"
        self.input_layernorm = self._build_norm(config, has_token_shift and not self.self_attention.shifts_tokens)
        self.has_mlp = config.block != "mixer"
        if self.has_mlp:
            self.pre_mlp_layernorm = self._build_norm(config, has_token_shift)
            self.mlp = SelectronMLP(config)

    @staticmethod
    def _build_norm(config: SelectronConfig, has_token_shift: bool) -> nn.Module:
        norm = _norm(config)
        return ShiftedNorm(norm, config.hidden_size) if has_token_shift else norm

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Map hidden states [b, t, h] to [b, t, h]. The arguments are those of `Mixer.forward`."""
        normed = _apply_norm(self.input_layernorm, x_bth, history, "before_mixer")
        x_bth = x_bth + self.self_attention(normed, history, positions)
        if not self.has_mlp:
            return x_bth
        x: Tensor = x_bth + self.mlp(_apply_norm(self.pre_mlp_layernorm, x_bth, history, "before_mlp"))
        return x


def _apply_norm(norm: nn.Module, x_bth: Tensor, history: EmptyHistory, name: str) -> Tensor:
    normed: Tensor = norm(x_bth, history, name) if isinstance(norm, ShiftedNorm) else norm(x_bth)
    return normed


class SelectronEmbedding(nn.Module):
    """Token embedding, and the learned position table if a mixer requires one."""

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__()
        self.word_embeddings: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.has_position_embeddings:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)


class SelectronDecoder(nn.Module):
    """All layers and the final norm."""

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelectronLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_layernorm = _norm(config)

    def forward(
        self, x_bth: Tensor, history: Sequence[EmptyHistory], positions: Positions, all_states: bool
    ) -> list[Tensor]:
        """Return the hidden states [b, t, h] after the final norm, as the last item of a list.

        With `all_states`, the hidden states before each layer precede them.
        """
        states = []
        for layer, layer_history in zip(self.layers, history, strict=True):
            if all_states:
                states.append(x_bth)
            x_bth = layer(x_bth, layer_history, positions)
        return [*states, self.final_layernorm(x_bth)]


class SelectronForCausalLM(PreTrainedModel, GenerationMixin):
    """Causal language model. The rows of a batch may be padded on the left.

    Args:
        config: configuration of the model.
    """

    config: SelectronConfig
    config_class = SelectronConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["SelectronLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["history", "past_key_values"]  # noqa: RUF012
    # Parameters of decays and step sizes. Rounding them to 16 bits would change decays and step sizes by some per cent.
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "A_log",
        "D",
        "dt_bias",
        "log_decay",
        "step_bias",
        "skip",
        "decay_bias",
        "decay_base",
    ]
    _tied_weights_keys = {"output_layer.weight": "embedding.word_embeddings.weight"}  # noqa: RUF012
    # Tokens cannot be removed from a recurrent state. With this flag transformers refuses assisted generation.
    _is_stateful = True

    def __init__(self, config: SelectronConfig) -> None:
        super().__init__(config)
        self.embedding = SelectronEmbedding(config)
        self.decoder = SelectronDecoder(config)
        self.output_layer: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # The first call creates a `SelectronCache`, which also holds recurrent states and the padding.
        return False

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embedding.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.output_layer

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer."""
        self.output_layer = new_embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize parameters that no checkpoint provides.

        This is a generic initialization. Selectron's training initializes differently.
        """
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the next token at each position.

        Args:
            input_ids: tokens [b, t]. Give either this or `inputs_embeds`.
            attention_mask: 1 for tokens and 0 for padding, [b, cached columns + t]; None: no padding. Positions count
                from the first token of a row.
            past_key_values: cache returned by an earlier call with `use_cache`.
            inputs_embeds: token embeddings [b, t, hidden].
            labels: target tokens [b, t], shifted inside; -100 is ignored.
            use_cache: whether to use a decode cache. None: as configured, but no cache in training or if a row has
                padding after its tokens, which a cache does not support.
            output_hidden_states: whether to return the hidden states before each layer and after the final norm.
            logits_to_keep: number of last positions, or indices of the positions, to compute logits for; 0: all.
            kwargs: arguments of the loss function.

        Returns:
            Logits [b, t, v], the loss if there are labels, and the cache if it is used.

        Raises:
            ValueError: an argument is unknown or inconsistent with the others.
        """
        _refuse_unknown(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_bth = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        cache, groups = self._prepare_rows(x_bth, attention_mask, past_key_values, use_cache)
        all_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = self._hidden_states(x_bth, groups, 0 if cache is None else cache.num_columns, bool(all_states))
        if cache is not None:
            cache.num_columns += x_bth.shape[1]
        kept_positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_btv = self.output_layer(states[-1][:, kept_positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_btv, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_btv,
            past_key_values=cache,
            hidden_states=tuple(states) if all_states else None,
        )

    def _prepare_rows(
        self, x_bth: Tensor, mask_bs: Tensor | None, history: SelectronCache | None, use_cache: bool | None
    ) -> tuple[SelectronCache | None, list[RowGroup]]:
        """Return the cache of this call, or None if it uses no cache, and the rows grouped by padding."""
        if history is not None and not isinstance(history, SelectronCache):
            raise ValueError(f"past_key_values is a {type(history).__name__}: give the cache of an earlier call")
        columns = x_bth.shape[1] + (history.num_columns if history is not None else 0)
        padding, has_right_padding = _check_mask(mask_bs, x_bth.shape[0], columns)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not has_right_padding
        if not use_cache and history is None:
            groups = group_rows(padding)
            for group in groups:
                group.layers = [EmptyHistory()] * self.config.num_hidden_layers
            return None, groups
        if self.training and self.is_gradient_checkpointing:
            raise ValueError("a cache would be written twice with gradient checkpointing: set use_cache=False")
        if has_right_padding:
            raise ValueError(
                "attention_mask has padding after the tokens of a row, which a cache does not support: pad on the left"
            )
        cache = SelectronCache(padding, self.config.num_hidden_layers) if history is None else history
        if cache.batch_size != x_bth.shape[0] or (mask_bs is not None and padding != cache.padding):
            raise ValueError(
                "past_key_values does not match: give the rows and the attention_mask of the earlier calls, extended"
            )
        return cache, cache.groups

    def _hidden_states(self, x_bth: Tensor, groups: list[RowGroup], num_cached: int, all_states: bool) -> list[Tensor]:
        """Return the hidden states as `SelectronDecoder.forward` does, with zeros at padding.

        Args:
            x_bth: embeddings.
            groups: batch rows grouped by padding.
            num_cached: number of columns before this call.
            all_states: whether to include the hidden states before each layer.
        """
        if len(groups) == 1 and groups[0].padding <= num_cached:
            return self._group_hidden_states(x_bth, groups[0], num_cached, all_states)
        states = [torch.zeros_like(x_bth) for _ in range(1 + all_states * self.config.num_hidden_layers)]
        for group in groups:
            rows, start = torch.tensor(group.rows, device=x_bth.device), max(group.padding - num_cached, 0)
            parts = self._group_hidden_states(x_bth[rows, start:], group, num_cached + start, all_states)
            for padded, part in zip(states, parts, strict=True):
                padded[rows, start:] = part.to(padded)
        return states

    def _group_hidden_states(self, x_bth: Tensor, group: RowGroup, column: int, all_states: bool) -> list[Tensor]:
        """Return the hidden states of rows with the same padding, as `SelectronDecoder.forward` does.

        The first column is `column`, which must be a token and not padding.
        """
        positions = Positions(column - group.padding, x_bth.shape[1], self.config)
        if self.config.has_position_embeddings:
            end, table = positions.first + positions.count, self.embedding.position_embeddings
            if end > table.num_embeddings:
                raise ValueError(
                    f"the sequence has {end} tokens, but the learned position table has {table.num_embeddings} rows: "
                    "shorten the sequence"
                )
            x_bth = x_bth + table(torch.arange(positions.first, end, device=x_bth.device))
        states: list[Tensor] = self.decoder(x_bth, group.layers, positions, all_states)
        return states


def _check_mask(mask_bs: Tensor | None, rows: int, columns: int) -> tuple[list[int], bool]:
    """Check the shape of a mask and return the result of `left_padding`. Without a mask there is no padding."""
    if mask_bs is None:
        return [0] * rows, False
    if tuple(mask_bs.shape) != (rows, columns):
        raise ValueError(
            f"attention_mask has shape {list(mask_bs.shape)}: give [{rows}, {columns}], including cached columns"
        )
    return left_padding(mask_bs)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    """Refuse unknown arguments, which would otherwise be ignored silently. None and False are accepted."""
    for name in set(kwargs) - LOSS_ARGUMENTS:
        value = kwargs.pop(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not an argument of this model: remove it")
