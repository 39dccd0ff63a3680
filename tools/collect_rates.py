"""Turn reports of `selectron bench layers` and `selectron bench train` into the rates that `selectron plan` uses.

    python tools/collect_rates.py > megatron_ext/planning/rates.json

reads the reports below docs/benchmarks that this module lists. A rate is model FLOPs divided by the seconds of the
forward and backward pass. Recomputation counts in neither.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.model.step_parts import FEED_FORWARD, LOSS, MIXER
from megatron_ext.planning.rates import Rate, feed_forward_rate_name, mixer_rate_name

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
LAYERS = [f"layers/gpu{number}.json" for number in range(4)]
TRAINING = [f"training/{name}.json" for name in ("100k_158fe53", "100k_e5273c8", "2k_08a0f50", "2k_e5273c8")]
FEW_HEADS = [f"layers/heads_{name}.json" for name in ("8b94096", "rwkv7_db9a971", "others_db9a971")]
"""Reports of mixers with all heads of a model, and with as few heads as one GPU of several mixes at a time."""
FP8_REPORT = "training/2k_ed2e6a3.json"
"""Report of which only the feed-forward rates of attention's fp8 rows are used."""
OLD_SWIGLU = {"158fe53"}
"""Commits before SwiGLU was one fused kernel. Their feed-forward and loss rates are outdated."""
OLD_ATTENTION = {"08a0f50"}
"""Commits before cuDNN's attention was preferred. Their attention rates are outdated."""


def main() -> None:
    """Print the rates as JSON."""
    few_heads = (rate for name in FEW_HEADS for rate in _few_head_rates(name))
    rates = [
        *(rate for name in LAYERS for rate, _ in _layer_rates(name)),
        *_training_rates(),
        *_fp8_rates(),
        *few_heads,
    ]
    last = {(rate.part, rate.hidden_size, rate.seq_length, rate.units or 0): rate for rate in rates}
    json.dump([asdict(last[key]) for key in sorted(last)], sys.stdout, indent=1)
    print()


def _layer_rates(name: str) -> Iterator[tuple[Rate, int]]:
    """Yield the rate of each mixer with the number of heads, over all samples, that it was measured with."""
    for row in json.loads((DOCS / name).read_text())["rows"]:
        if row["layer"] == "ours" and "ms" in row:
            flops = row["flops_per_token"] * row["length"] * row["batch"] / row["ms"] * 1e3
            part = mixer_rate_name(row["mixer"], "exact")  # the default score, which that benchmark uses
            shape = {"hidden_size": row["hidden"], "seq_length": row["length"]}
            rate = Rate(part=part, **shape, flops=float(f"{flops:.4g}"), forward_share=None, source=name)
            yield rate, row["heads"] * row["batch"]


def _few_head_rates(name: str) -> Iterator[Rate]:
    """Yield the rates of mixers that were measured with more than one number of heads."""
    rates = [replace(rate, units=units) for rate, units in _layer_rates(name)]
    rows = Counter(rate.part for rate in rates)
    return (rate for rate in rates if rows[rate.part] > 1)


def _training_rates() -> Iterator[Rate]:
    for name in TRAINING:
        for row in json.loads((DOCS / name).read_text())["rows"]:
            if row.get("measured", {}).get("breakdown"):
                yield from _row_rates(row, name, Path(name).stem.split("_")[1])


def _fp8_rates() -> Iterator[Rate]:
    for row in json.loads((DOCS / FP8_REPORT).read_text())["rows"]:
        fp8 = row["configuration"]["training"]["fp8"]
        if fp8 != "none" and row["configuration"]["model"]["pattern"].startswith("attention*"):
            yield from (r for r in _row_rates(row, FP8_REPORT, "ed2e6a3") if r.part == feed_forward_rate_name(fp8))


def _row_rates(row: dict[str, Any], name: str, commit: str) -> Iterator[Rate]:
    config, measured = row["configuration"], row["measured"]
    model, (mixer, *others) = config["model"], parse_pattern(config["model"]["pattern"])
    assert set(others) <= {mixer}, "a rate is of one mixer"
    layers = 1 + len(others)
    feed_forward = 6 * 3 * model["hidden_size"] * model["ffn_hidden_size"] * layers
    loss = 6 * measured["parameters"]["output_layer_parameters"]
    flops = {FEED_FORWARD: feed_forward, LOSS: loss, MIXER: measured["flops_per_token"] - feed_forward - loss}
    outdated = {MIXER} if commit in OLD_ATTENTION and mixer == "attention" else set()
    if commit in OLD_SWIGLU:
        outdated = {FEED_FORWARD, LOSS}
    score = config["mixers"].get(mixer, {}).get("score", "exact")
    fp8 = config["training"].get("fp8", "none")  # absent in older rows
    names = {MIXER: mixer_rate_name(mixer, score), FEED_FORWARD: feed_forward_rate_name(fp8), LOSS: LOSS}
    for part in flops.keys() - outdated:
        forward, backward = (measured["breakdown"]["phases"][part][phase] for phase in ("forward", "backward"))
        yield Rate(
            part=names[part],
            hidden_size=model["hidden_size"],
            seq_length=config["data"]["seq_length"],
            flops=float(f"{flops[part] * measured['tokens'] / (forward + backward):.4g}"),
            forward_share=round(forward / (forward + backward), 3),
            source=name,
        )


if __name__ == "__main__":
    main()
