"""Settings of the built-in mixers: the fields of `mixers.<name>`. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_ext.config.schema import STRICT, PowerOfTwo

NUM_BRANCHES = 3
"""Number of branches of NSA: compression, selection and window."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AttentionConfig:
    """Settings of softmax attention: the ablation factors of the study (arXiv 2505.18522).

    The defaults are Transformer++.

    Attributes:
        window: number of keys a query sees, its own included; None: all up to its own.
        temperature: divisor of the query-key products; below 1 the softmax is sharper. ALiBi's bias is not divided, so
            that its cost per token of distance does not depend on the temperature. The study's two factors can thus be
            varied independently.
        random_keys: True: keys are frozen random vectors, one per position and key head, so that scores carry no
            relation between tokens. Keys are then neither projected nor rotated, and queries are not rotated either.
        random_keys_seed: seed of those vectors.
        position_encoding: rotary, none, ALiBi's biases, or a learned table added at the model's input.
    """

    window: PositiveInt | None = None
    temperature: PositiveFloat = 1.0
    random_keys: bool = False
    random_keys_seed: NonNegativeInt = 0
    position_encoding: Literal["rope", "none", "alibi", "learned"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Top1ElementConfig:
    """Settings of Top-1 Element.

    Attributes:
        estimator: gradient estimator of the choice: straight-through softmax, or the chosen probability alone.
        position_encoding: rotary or none.
    """

    estimator: Literal["straight_through", "selected"] = "straight_through"
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Top1ChunkConfig:
    """Settings of Top-1 Chunk.

    Attributes:
        chunk_size: keys per chunk, a power of two; the GPU kernels take 32 to 512.
        top_k: number of complete earlier chunks that each query chooses, at most 16.
        score: score of a chunk: the product of query and mean key (`approx`), the maximum over its keys (`exact`), or
            the log-sum-exp over its keys (`exact_lse`).
        local: True if the query also attends to its own chunk, up to its own position.
        position_encoding: rotary or none.
    """

    ALWAYS_LABELLED: ClassVar[tuple[str, ...]] = ("score",)
    """Approximate and exact selection are different architectures in the study."""

    chunk_size: PowerOfTwo = 128
    top_k: Annotated[int, Field(ge=1, le=16)] = 1
    score: Literal["approx", "exact", "exact_lse"] = "exact"
    local: bool = True
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MoBAConfig:
    """Settings of MoBA.

    Attributes:
        block_size: keys per block, a power of two; the GPU kernels take 32 to 512.
        top_k: number of blocks that each query attends to, its own included: 2 to 17.
        position_encoding: rotary or none.
    """

    block_size: PowerOfTwo = 512
    top_k: Annotated[int, Field(ge=2, le=17)] = 3
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NSAConfig:
    """Settings of Native Sparse Attention.

    Attributes:
        block_size: keys per block, a power of two, for compression and selection.
        num_selected: number of blocks that each query attends to in full. They include its own block, the one before
            and the first one; values below 3 mean 3.
        window: number of keys a query sees in the window branch, its own included.
        position_encoding: rotary or none.
    """

    block_size: PowerOfTwo = 64
    num_selected: PositiveInt = 16
    window: PositiveInt = 512
    position_encoding: Literal["rope", "none"] = "rope"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BasedConfig:
    """Settings of Based.

    Attributes:
        feature_dim: width of a head's queries and keys before the feature map.
    """

    feature_dim: PositiveInt = 16


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LinearAttentionConfig:
    """Settings of linear attention.

    The paper's division by the sum of weights is left out: the norm of each head's output would cancel it.

    Attributes:
        feature_map: map of queries and keys: elu(x) + 1 (as in the paper), relu, or none.
        expand_v: width of a value head divided by that of a key head.
        output_gate: True if a SiLU gate follows the output norm.
    """

    feature_map: Literal["elu", "relu", "identity"] = "elu"
    expand_v: PositiveInt = 1
    output_gate: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RetNetConfig:
    """Settings of RetNet.

    Attributes:
        expand_v: width of a value head divided by that of a key head; 2 in the paper.
        output_gate: True if a SiLU gate follows the output norm.
    """

    expand_v: PositiveInt = 2
    output_gate: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GLAConfig:
    """Settings of GLA.

    Attributes:
        expand_v: width of a value head divided by that of a key head; 2 in the paper.
        output_gate: True if a SiLU gate follows the output norm.
        decay_rank: rank of the projection to the decays.
        decay_temperature: divisor of the logarithm of a decay.
    """

    expand_v: PositiveInt = 2
    output_gate: bool = True
    decay_rank: PositiveInt = 16
    decay_temperature: PositiveFloat = 16.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeltaNetConfig:
    """Settings of DeltaNet.

    Attributes:
        conv_kernel_size: kernel size of the short causal convolution over q, k and v, the current position included.
        expand_v: width of a value head divided by that of a key head.
        output_gate: True if a SiLU gate follows the output norm.
    """

    conv_kernel_size: PositiveInt = 4
    expand_v: PositiveInt = 1
    output_gate: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GatedDeltaNetConfig(DeltaNetConfig):
    """Settings of gated DeltaNet: the fields of `DeltaNetConfig`, with the output gate on by default."""

    output_gate: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MambaConfig:
    """Settings of Mamba.

    Attributes:
        state_size: size of a channel's state.
        expand: channels of a head divided by head_dim.
        conv_kernel_size: kernel size of the short causal convolution over the channels, the current position included.
        dt_rank: rank of the projection to the step sizes; None: hidden_size / 16, rounded up.
    """

    state_size: PositiveInt = 16
    expand: PositiveInt = 2
    conv_kernel_size: PositiveInt = 4
    dt_rank: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mamba2Config:
    """Settings of Mamba-2.

    Attributes:
        state_size: width of B and C, which write to the state and read from it.
        expand: width of a head's value divided by head_dim.
        conv_kernel_size: kernel size of the short causal convolution over x, B and C, the current position included.
        convolution: True to apply that convolution; SiLU follows in both cases.
        decay: `data_dependent`: a head's step size and decay depend on the token; `fixed`: one learned step size for
            all tokens; `none`: no step size and no decay, the state only accumulates.
        group_norm: True if an RMSNorm over the heads of a group follows the gate.
    """

    state_size: PositiveInt = 128
    expand: PositiveInt = 2
    conv_kernel_size: PositiveInt = 4
    convolution: bool = True
    decay: Literal["data_dependent", "fixed", "none"] = "data_dependent"
    group_norm: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RWKV6Config:
    """Settings of RWKV-6.

    Attributes:
        mix_rank: rank of the projections to each of a token's five mixtures.
        decay_rank: rank of the projection to the decays.
    """

    mix_rank: PositiveInt = 32
    decay_rank: PositiveInt = 64


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RWKV7Config:
    """Settings of RWKV-7. A rank of None is c * sqrt(hidden_size), rounded to a multiple of 32 and at least 32.

    Attributes:
        decay_rank: rank of the projection to the decays; c = 2.5 * head_dim / 64.
        rate_rank: rank of the projection to the in-context learning rates; c as for the decays.
        gate_rank: rank of the projection to the gates; c = 5.
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
"""Settings class by mixer name. Another mixer passes its own class to `registry.register`."""


def settings_class(mixer: str) -> type[Any] | None:
    """Return the settings class of a mixer; None: there is no such mixer, or torch is not installed.

    Only a mixer that is not in `SETTINGS` has all mixers imported, and torch with them.
    """
    if mixer in SETTINGS:
        return SETTINGS[mixer]
    try:  # by name: the registry imports this module
        resolve_name("megatron_ext.platform.device:prepare_megatron_import")()
        entry = resolve_name("megatron_ext.mixers.core.registry:load_all")().get(mixer)
    except ImportError:
        return None
    return None if entry is None else entry.config_type


def default_settings(mixer: str) -> dict[str, Any]:
    """Return the default of every setting of a mixer; nothing for an unknown mixer.

    A run of an earlier version that lacks a setting had its default.
    """
    kind = settings_class(mixer)
    return {} if kind is None else asdict(kind())


def always_labelled(mixer: str) -> tuple[str, ...]:
    """Return the settings that the label of a run shows even at their defaults: `ALWAYS_LABELLED` of the class."""
    return getattr(settings_class(mixer), "ALWAYS_LABELLED", ())
