"""The settings of the mixers here, their fields of `mixers.<name>`: without torch, for who only reads about a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_ext.config.schema import STRICT, PowerOfTwo

NUM_BRANCHES = 3
"""Of NSA: compression, selection, window."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AttentionConfig:
    """The ablation factors of the study (arXiv 2505.18522); the defaults are Transformer++.

    Attributes:
        window: keys a query sees, itself included; None: all before it.
        temperature: divides the products of queries and keys; below 1 the softmax is sharper. ALiBi's bias is not
            divided: a slope is what a token of distance costs, whatever the temperature, so that the study's two
            factors can be varied one by one. (Divided with the products, it would be a sharper ALiBi, too.)
        random_keys: keys are frozen random vectors, one a position and key head, so that scores carry no relation
            between tokens. Nothing is projected or rotated for them, and queries are not rotated either.
        random_keys_seed: of those vectors.
        position_encoding: rotary, none, ALiBi's biases, or a learned table added at the model's input.
    """

    window: PositiveInt | None = None
    temperature: PositiveFloat = 1.0
    random_keys: bool = False
    random_keys_seed: NonNegativeInt = 0
    position_encoding: Literal["rope", "none", "alibi", "learned"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Top1ElementConfig:
    """Top-1 Element.

    Attributes:
        estimator: of the gradient through the choice: straight-through softmax, or the chosen probability alone.
        position_encoding: rotary or none.
    """

    estimator: Literal["straight_through", "selected"] = "straight_through"
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Top1ChunkConfig:
    """Top-1 Chunk.

    Attributes:
        chunk_size: keys a chunk, a power of two; the GPU kernels take 32 to 512.
        top_k: complete earlier chunks each query chooses, at most 16.
        score: of a chunk: the query with its mean key (`approx`), the best of its keys (`exact`), or the logarithm of
            the sum of exponentials over its keys (`exact_lse`).
        local: whether the query's own chunk, up to the query, takes part.
        position_encoding: rotary or none.
    """

    chunk_size: PowerOfTwo = 128
    top_k: Annotated[int, Field(ge=1, le=16)] = 1
    score: Literal["approx", "exact", "exact_lse"] = "exact"
    local: bool = True
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MoBAConfig:
    """MoBA.

    Attributes:
        block_size: keys a block, a power of two; the GPU kernels take 32 to 512.
        top_k: blocks that each query attends to, its own included: 2 to 17.
        position_encoding: rotary or none.
    """

    block_size: PowerOfTwo = 512
    top_k: Annotated[int, Field(ge=2, le=17)] = 3
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NSAConfig:
    """Native Sparse Attention.

    Attributes:
        block_size: keys a block, a power of two; of compression and of selection.
        num_selected: blocks each query attends to in full, its own, the one before and the first one included; less
            than 3 is taken as 3.
        window: keys a query sees in the window branch, itself included.
        position_encoding: rotary or none.
    """

    block_size: PowerOfTwo = 64
    num_selected: PositiveInt = 16
    window: PositiveInt = 512
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BasedConfig:
    """Based.

    Attributes:
        feature_dim: width of a head's queries and keys, from which the features are made.
    """

    feature_dim: PositiveInt = 16


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LinearAttentionConfig:
    """Linear attention.

    The sum of weights that the paper divides by is left out: the norm of each head's output would undo it.

    Attributes:
        feature_map: of queries and keys: elu(x) + 1 (the paper's), relu, or none.
        expand_v: width of a value head over that of a key head.
        output_gate: whether a SiLU gate follows the output norm.
    """

    feature_map: Literal["elu", "relu", "identity"] = "elu"
    expand_v: PositiveInt = 1
    output_gate: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RetNetConfig:
    """RetNet.

    Attributes:
        expand_v: width of a value head over that of a key head; the paper has 2.
        output_gate: whether a SiLU gate follows the output norm.
    """

    expand_v: PositiveInt = 2
    output_gate: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GLAConfig:
    """GLA.

    Attributes:
        expand_v: width of a value head over that of a key head; the paper has 2.
        output_gate: whether a SiLU gate follows the output norm.
        decay_rank: width of what all decays of a token are made from.
        decay_temperature: what the logarithm of a decay is divided by.
    """

    expand_v: PositiveInt = 2
    output_gate: bool = True
    decay_rank: PositiveInt = 16
    decay_temperature: PositiveFloat = 16.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeltaNetConfig:
    """DeltaNet.

    Attributes:
        conv_kernel_size: positions, the own one included, that the short causal convolution over q, k and v sees.
        expand_v: width of a value head over that of a key head.
        output_gate: whether a SiLU gate follows the output norm.
    """

    conv_kernel_size: PositiveInt = 4
    expand_v: PositiveInt = 1
    output_gate: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GatedDeltaNetConfig(DeltaNetConfig):
    """Gated DeltaNet: the fields of DeltaNet."""

    output_gate: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MambaConfig:
    """Mamba.

    Attributes:
        state_size: numbers in a channel's state.
        expand: channels of a head over head_dim.
        conv_kernel_size: positions, the own one included, that the short causal convolution over the channels sees.
        dt_rank: width of what all step sizes of a token are made from; None: a 16th of the hidden size, rounded up.
    """

    state_size: PositiveInt = 16
    expand: PositiveInt = 2
    conv_kernel_size: PositiveInt = 4
    dt_rank: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mamba2Config:
    """Mamba-2.

    Attributes:
        state_size: width of B and C, which write to the state and read from it.
        expand: width of a head's value over head_dim.
        conv_kernel_size: positions, the own one included, that the short causal convolution over x, B and C sees.
        convolution: whether there is that convolution; SiLU follows either way.
        decay: what a head's step and decay are: of each token's choice; fixed, one learned step for every token; or
            none, where the state only adds x as it is.
        group_norm: whether an RMSNorm over the heads of a group follows the gate.
    """

    state_size: PositiveInt = 128
    expand: PositiveInt = 2
    conv_kernel_size: PositiveInt = 4
    convolution: bool = True
    decay: Literal["data_dependent", "fixed", "none"] = "data_dependent"
    group_norm: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RWKV6Config:
    """RWKV-6.

    Attributes:
        mix_rank: width of what each of a token's five mixtures is made from.
        decay_rank: width of what all decays of a token are made from.
    """

    mix_rank: PositiveInt = 32
    decay_rank: PositiveInt = 64


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RWKV7Config:
    """RWKV-7. A rank left at None is c * sqrt(hidden size), rounded to a multiple of 32, at least 32.

    Attributes:
        decay_rank: width of what all decays of a token are made from; c is 2.5 * head_dim / 64.
        rate_rank: width of what its in-context learning rates are made from; c as of the decays.
        gate_rank: width of what its gates are made from; c is 5.
    """

    decay_rank: PositiveInt | None = None
    rate_rank: PositiveInt | None = None
    gate_rank: PositiveInt | None = None


SETTINGS: dict[str, type] = {
    "attention": AttentionConfig,
    "top1_element": Top1ElementConfig,
    "top1_chunk": Top1ChunkConfig,
    "moba": MoBAConfig,
    "nsa": NSAConfig,
    "based": BasedConfig,
    "linear_attention": LinearAttentionConfig,
    "retnet": RetNetConfig,
    "gla": GLAConfig,
    "deltanet": DeltaNetConfig,
    "gated_deltanet": GatedDeltaNetConfig,
    "mamba": MambaConfig,
    "mamba2": Mamba2Config,
    "rwkv6": RWKV6Config,
    "rwkv7": RWKV7Config,
}
"""By the mixer's name. A mixer in a file of its own may bring its settings itself; see `registry.register`."""
