"""Models that the tests convert: every mixer, and every setting that changes the computation."""

from __future__ import annotations

from typing import Any

ROPE, NONE = {"position_encoding": "rope"}, {"position_encoding": "none"}

# Mixer, settings of the mixer, sizes of the model.
MIXERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("attention", {}, {}),
    ("attention", {"window": 3}, {}),
    ("attention", {"window": 1, "temperature": 0.5}, {}),
    ("attention", {"position_encoding": "alibi", "temperature": 0.5}, {"num_attention_heads": 6, "head_dim": 4}),
    ("attention", {"position_encoding": "alibi", "window": 7}, {}),
    ("attention", {"random_keys": True}, {}),
    ("attention", {"random_keys": True, "random_keys_seed": 5, "window": 3}, {}),
    ("attention", NONE, {"tie_embeddings": True}),
    ("attention", {"position_encoding": "learned"}, {"num_query_groups": 4}),
    ("top1_element", {}, {}),
    ("top1_element", NONE | {"estimator": "selected"}, {"num_query_groups": 4}),
    ("top1_chunk", {"chunk_size": 8}, {}),
    ("top1_chunk", {"chunk_size": 4, "score": "approx", "local": False}, {}),
    ("top1_chunk", {"chunk_size": 4, "score": "exact_lse", "top_k": 2}, {}),
    ("top1_chunk", {"chunk_size": 4, "top_k": 16} | NONE, {"num_query_groups": 4}),
    ("moba", {"block_size": 8, "top_k": 2}, {}),
    ("moba", {"block_size": 4, "top_k": 5} | NONE, {}),
    ("nsa", {"block_size": 4, "num_selected": 4, "window": 3}, {}),
    ("nsa", {"block_size": 8, "num_selected": 2, "window": 20} | NONE, {"num_query_groups": 1}),
    ("linear_attention", {}, {}),
    ("linear_attention", {"feature_map": "relu", "expand_v": 2, "output_gate": True}, {}),
    ("linear_attention", {"feature_map": "identity"}, {"norm_epsilon": 1e-3}),
    ("retnet", {}, {"rotary_base": 500.0}),
    ("gla", {}, {}),
    ("gla", {"expand_v": 1, "output_gate": False, "decay_rank": 3, "decay_temperature": 2.0}, {}),
    ("based", {"feature_dim": 5}, {}),
    ("based", {"feature_dim": 4}, {}),
    ("deltanet", {}, {}),
    ("deltanet", {"expand_v": 2, "output_gate": True, "conv_kernel_size": 1}, {}),
    ("gated_deltanet", {}, {}),
    ("mamba", {}, {}),
    ("mamba", {"state_size": 3, "expand": 1, "conv_kernel_size": 2, "dt_rank": 1}, {}),
    ("mamba2", {"state_size": 8}, {}),
    ("mamba2", {"state_size": 8, "decay": "fixed"}, {"num_query_groups": 4}),
    ("mamba2", {"state_size": 8, "decay": "none", "convolution": False, "group_norm": False}, {}),
    ("rwkv6", {}, {}),
    ("rwkv6", {"mix_rank": 2, "decay_rank": 3}, {}),
    ("rwkv7", {}, {}),
    ("rwkv7", {"decay_rank": 2, "rate_rank": 3, "gate_rank": 4}, {}),
]

HYBRID = "(top1_chunk*2,attention,gated_deltanet,rwkv7,mamba,nsa)"
HYBRID_MIXERS = {
    "top1_chunk": {"chunk_size": 8},
    "attention": {"position_encoding": "learned", "window": 9},
    "nsa": {"block_size": 4, "num_selected": 4, "window": 5},
}

Case = tuple[str, dict[str, Any], dict[str, Any]]

CASES: dict[str, Case] = {
    **{
        "-".join([name, *(str(value) for value in settings.values()), *(str(value) for value in sizes.values())]): (
            f"{name}*2",
            {name: settings},
            sizes,
        )
        for name, settings, sizes in MIXERS
    },
    "hybrid": (HYBRID, HYBRID_MIXERS, {"tie_embeddings": True}),
    "rwkv7-block": (HYBRID, HYBRID_MIXERS, {"block": "rwkv7"}),
    "mixer-block": (HYBRID, HYBRID_MIXERS, {"block": "mixer"}),
    "layer-norm": ("attention,rwkv7,mamba", {}, {"normalization": "layer_norm", "block": "rwkv7"}),
}
"""Layer pattern, mixer settings and sizes of the model, by name."""
