"""Models and layouts that `test_parity.py` compares, and their table in the README.

`python tests/distributed/parity_cases.py` rewrites the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.utils import markdown

README = Path(__file__).parents[2] / "README.md"


@dataclass(frozen=True)
class Model:
    """Model to train: layer pattern, mixer configurations, further fields of `model`, and layouts (empty: all)."""

    pattern: str
    mixers: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()


def chunks(score: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Settings of Top-1 Chunk for sequences of 32 tokens."""
    return {"top1_chunk": {"chunk_size": 8, "score": score} | more}


# Each kind of model parallelism once, for further variants of a mixer that is itself compared under every layout. The
# other layouts only combine these kinds or split data, in code that a variant shares with its mixer.
KINDS = ("tp2_sp", "pp2", "cp2", "cp2_states", "cp2_chunks")


# A mixer without a line here is compared with default settings, see below. Two layers give two pipeline stages.
MODELS = {
    "attention": Model("attention*2"),
    "attention_window_gqa": Model("attention*2", {"attention": {"window": 5}}, {"num_query_groups": 2}, layouts=KINDS),
    "attention_alibi": Model("attention*2", {"attention": {"position_encoding": "alibi"}}, layouts=KINDS),
    # Only with sequence parallelism, Megatron scatters the sum of token and position embeddings.
    "attention_learned": Model(
        "attention*2", {"attention": {"position_encoding": "learned"}}, layouts=(*KINDS, "tp2_cp2")
    ),
    "attention_random_keys": Model(
        "attention*2", {"attention": {"random_keys": True, "temperature": 0.5}}, layouts=KINDS
    ),
    "top1_chunk_approx": Model("top1_chunk*2", chunks("approx"), layouts=KINDS),
    "top1_chunk_exact": Model("top1_chunk*2", chunks("exact")),
    "top1_chunk_exact_lse": Model("top1_chunk*2", chunks("exact_lse"), layouts=KINDS),
    "top1_chunk_top2_gqa": Model("top1_chunk*2", chunks("exact", top_k=2), {"num_query_groups": 2}, layouts=KINDS),
    # With the output gate: without it, the norm makes the first token's output, (q.k) v, flip with the sign of q.k, and
    # rounding differences grow to 1e-5 in a few steps. linear_attention covers layers without a gate.
    "deltanet": Model("deltanet*2", {"deltanet": {"output_gate": True}}),
    "gated_deltanet": Model("gated_deltanet*2"),
    "gla": Model("gla*2"),
    "linear_attention": Model("linear_attention*2"),
    "retnet": Model("retnet*2"),
    "based": Model("based*2"),
    "nsa_gqa": Model("nsa*2", {"nsa": {"block_size": 4, "num_selected": 4, "window": 5}}, {"num_query_groups": 2}),
    "mamba2": Model("mamba2*2", {"mamba2": {"state_size": 16}}),
    "mamba2_fixed_gqa": Model(
        "mamba2*2",
        {"mamba2": {"state_size": 16, "decay": "fixed"}},
        {"num_attention_heads": 8, "num_query_groups": 4},
        KINDS,
    ),
    "rwkv6": Model("rwkv6*2"),
    "rwkv7": Model("rwkv7*2"),
    # Without states to hand on, or by another exchange: after those above, which then share models under all layouts.
    "top1_element": Model("top1_element*2"),
    "top1_element_selected": Model("top1_element*2", {"top1_element": {"estimator": "selected"}}, layouts=KINDS),
    "moba": Model("moba*2", {"moba": {"block_size": 8, "top_k": 2}}),
    "mamba": Model("mamba*4"),  # with two layers the gradient is too small for clipping
    # One mixer whose tokens the block shifts, and one with its own token shift.
    "rwkv7_block": Model("(top1_chunk,rwkv7)*2", chunks("exact"), {"block": "rwkv7"}),
    "layer_norm": Model(
        "(gated_deltanet,attention)*2",
        model={"block": "rwkv7", "normalization": "layer_norm"},
        layouts=("tp2_cp2", "pp2", "tp2_pp2_sp"),
    ),
    "mixer_block": Model(
        "(mamba,mamba2)*2",
        {"mamba2": {"state_size": 16}},
        {"block": "mixer"},
        layouts=("tp2_cp2", "pp2", "pp2_interleaved", "tp2_pp2_sp"),
    ),
    "hybrid": Model("top1_chunk,gated_deltanet,attention,gated_deltanet", chunks("exact")),
}

_WITH_A_LINE = {mixer for model in MODELS.values() for mixer in parse_pattern(model.pattern)}
MODELS |= {mixer: Model(f"{mixer}*2") for mixer in sorted(set(load_all()) - _WITH_A_LINE)}

# `parallel.sequence` is on by default, so layouts without sequence parallelism must turn it off.
TWO = {
    "tp2": {"tensor": 2, "sequence": False},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp2_interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2, "context_exchange": "heads"},
    "cp2_states": {"context": 2, "context_exchange": "states"},
    "cp2_chunks": {"context": 2, "context_exchange": "chunks"},
    "dp2": {},
}
FOUR = {
    "tp2_pp2_sp": {"tensor": 2, "pipeline": 2, "sequence": True},
    "tp2_cp2": {"tensor": 2, "sequence": False, "context": 2, "context_exchange": "heads"},
    "tp2_cp2_sp": {"tensor": 2, "sequence": True, "context": 2, "context_exchange": "heads"},
    "pp2_cp2": {"pipeline": 2, "context": 2, "context_exchange": "states"},
}
LAYOUTS = {name: (2, parallel) for name, parallel in TWO.items()} | {n: (4, parallel) for n, parallel in FOUR.items()}


def deep_enough(model: Model, parallel: dict[str, Any]) -> Model:
    """Return the model, with twice as many layers if it has fewer than the layout's (virtual) pipeline stages."""
    pieces = parallel.get("pipeline", 1) * parallel.get("virtual_pipeline", 1)
    return model if len(parse_pattern(model.pattern)) >= pieces else replace(model, pattern=f"({model.pattern})*2")


def compared() -> Iterator[tuple[str, str]]:
    """Yield each pair of model and layout that is compared with one process."""
    for name, model in MODELS.items():
        mixers = [load_all()[mixer] for mixer in parse_pattern(model.pattern)]
        have_choice = {
            "cp2_states": any(mixer.traits.supports_state_passing for mixer in mixers),
            "cp2_chunks": any(mixer.traits.chunk_field is not None for mixer in mixers),
        }
        layouts = model.layouts or tuple(LAYOUTS)
        yield from ((name, layout) for layout in layouts if have_choice.get(layout, True))


COLUMNS = {
    "tp2": "TP2",
    "tp2_sp": "TP2 + SP",
    "pp2": "PP2",
    "pp2_interleaved": "PP2 interleaved",
    "cp2": "CP2",
    "cp2_states": "CP2, states handed on",
    "cp2_chunks": "CP2, chunks fetched",
    "dp2": "DP2",
    "tp2_pp2_sp": "TP2 x PP2 + SP",
    "tp2_cp2": "TP2 x CP2",
    "tp2_cp2_sp": "TP2 x CP2 + SP",
    "pp2_cp2": "PP2 x CP2",
}


def table() -> str:
    """Markdown table of the layouts under which each mixer is compared. It includes only models of a single mixer."""
    held = {(MODELS[model].pattern.partition("*")[0], layout) for model, layout in compared()}
    rows = [
        [f"`{mixer}`", *("yes" if (mixer, layout) in held else "" for layout in COLUMNS)]
        for mixer in sorted(load_all())
    ]
    return "\n".join(markdown.table(["", *COLUMNS.values()], rows)) + "\n"


def readme_with_table() -> str:
    """Return the README with the current table."""
    text = README.read_text(encoding="utf-8")
    return re.sub(r"(?<=<!-- parity -->\n\n).*?\n(?=\n<!-- end -->)", table(), text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(readme_with_table(), encoding="utf-8")
