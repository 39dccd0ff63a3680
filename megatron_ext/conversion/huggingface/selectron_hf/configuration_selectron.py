"""Configuration of a Selectron model for transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

BLOCKS = ("transformer", "rwkv7", "mixer")
NORMALIZATIONS = ("rms_norm", "layer_norm")


class SelectronConfig(PreTrainedConfig):
    """Configuration from which a Selectron model is built.

    Args:
        vocab_size: number of tokens, without padding.
        hidden_size: width of the residual stream.
        num_attention_heads: number of query heads of every mixer.
        num_key_value_heads: number of query groups (GQA).
        head_dim: width of a head.
        intermediate_size: hidden width of the feed-forward layer; None if the block has no feed-forward layer.
        max_position_embeddings: number of rows of the learned position table, if there is one.
        layer_mixers: mixer name of each layer.
        mixers: complete settings of each mixer, by mixer name.
        block: structure around a mixer: `transformer` (SwiGLU feed-forward), `rwkv7` (token shift, squared ReLU) or
            `mixer` (norm and residual only).
        normalization: norm of the residual stream: `rms_norm` or `layer_norm`.
        norm_epsilon: epsilon of every norm.
        rope_theta: base of the rotary frequencies.
        initializer_range: standard deviation of normally distributed initial weights.
        tie_word_embeddings: whether the output layer shares the weight of the input embedding.
        use_cache: whether generation uses a decode cache.
        bos_token_id: token that begins a document; None: unknown.
        eos_token_id: token or tokens that end a document; None: unknown.
        pad_token_id: padding token; None: unknown.
        kwargs: arguments of `PreTrainedConfig`. Further fields of the model configuration become attributes.

    Raises:
        ValueError: `block` or `normalization` is unknown, or a mixer has no settings.
    """

    model_type = "selectron"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 16,
        intermediate_size: int | None = 192,
        max_position_embeddings: int = 2048,
        layer_mixers: Sequence[str] = (),
        mixers: Mapping[str, Mapping[str, Any]] | None = None,
        block: str = "transformer",
        normalization: str = "rms_norm",
        norm_epsilon: float = 1e-5,
        rope_theta: float = 10000.0,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.layer_mixers = list(layer_mixers)
        self.mixers = {name: dict(settings) for name, settings in (mixers or {}).items()}
        self.block = block
        self.normalization = normalization
        self.norm_epsilon = norm_epsilon
        self.rope_theta = rope_theta
        self.initializer_range = initializer_range
        self.tie_word_embeddings = tie_word_embeddings
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        kwargs.pop("num_hidden_layers", None)  # derived from layer_mixers
        self.num_hidden_layers = len(self.layer_mixers)
        self._check()
        super().__init__(**kwargs)

    def _check(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"block is {self.block!r}: give one of {list(BLOCKS)}")
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization is {self.normalization!r}: give one of {list(NORMALIZATIONS)}")
        missing = sorted(set(self.layer_mixers) - set(self.mixers))
        if missing:
            raise ValueError(f"mixers has no settings of {missing}, which layer_mixers contains")

    @property
    def has_position_embeddings(self) -> bool:
        """True if a learned position table is added to the input, because the mixer of some layer requires it."""
        return any(self.mixers[name].get("position_encoding") == "learned" for name in self.layer_mixers)
