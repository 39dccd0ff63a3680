"""Combine reports of `selectron bench train` into one table of mixers by GPUs and sequence length.

    python tools/training_table.py

rewrites the table in docs/benchmarks/training.md from the reports that this module lists. If several reports have a
value for a cell, the fastest is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.utils.markdown import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "training.md"
REPORTS = [
    *("100k_ed2e6a3", "2k_ed2e6a3", "8k_beb3a07", "32k_beb3a07"),
    *("100k_66b7b20", "8k_66b7b20", "32k_66b7b20"),
    *("100k_two_gpus_4f0b591", "2k_two_gpus_4f0b591", "8k_two_gpus_4f0b591", "32k_two_gpus_4f0b591"),
    *("100k_two_gpus_ed2e6a3", "100k_four_gpus_ea7afd2", "100k_four_gpus_2_ea7afd2"),
    *("100k_approx_d52b783", "100k_exact_d52b783", "100k_rwkv7_block_d52b783", "100k_gdn_d52b783"),
    *("2k_four_gpus_d52b783", "1m_four_gpus_d52b783"),
    *("dp4_6768b71", "dp4_2_6768b71", "two_gpus_6768b71"),
    *("2k_5dfa910", "8k_5dfa910", "32k_5dfa910", "100k_fp8_5dfa910"),
    *("8k_two_gpus_5dfa910", "32k_two_gpus_5dfa910", "100k_rounds_5dfa910", "100k_megatron_four_gpus_5dfa910"),
    *("gdn_two_gpus_8b94096", "hybrid_two_gpus_8b94096", "rwkv7_block_two_gpus_8b94096"),
    *("32k_rwkv7_block_two_gpus_8b94096", "100k_megatron_two_gpus_8b94096", "100k_layouts_four_gpus_8b94096"),
    *("100k_two_gpus_6550355", "100k_four_gpus_6550355"),
    *("100k_two_h100_beb3a07", "100k_two_h100_1c4c8c8"),
]
LENGTHS = [2048, 8192, 32768, 102400, 524288, 1048576]
KIND = "H200"
"""GPU of most rows. Rows of other GPUs come after them."""
MIXERS = {"attention": "attention", "gated_deltanet": "gated DeltaNet", "top1_chunk": "Top-1 Chunk"}

Row = tuple[str, str, str]
"""Model, GPUs and layout."""


def cells() -> dict[Row, dict[int, str]]:
    """Return the cells by row and length: tokens/s per GPU, MFU, peak memory in GiB, and `training.recompute`."""
    by_row: dict[Row, dict[int, tuple[float, str]]] = {}
    for name in REPORTS:
        report = json.loads((PAGE.parent / "training" / f"{name}.json").read_text())
        for row in report["rows"]:
            if "derived" in row:
                config, derived = row["configuration"], row["derived"]
                gpu = re.sub(r"^NVIDIA (\S+).*", r"\1", report["machine"]["gpu"])
                key = _model(row), f"{row['processes']} {gpu}", _layout(config["parallel"], row["processes"])
                mfu = (
                    ""
                    if "exact" in key[0] or config["training"]["fp8"] != "none"
                    else f", {100 * derived['mfu']:.0f} %"
                )
                gib = row["measured"]["memory"]["allocated"] / 2**30
                speed, length = derived["tokens_per_s_per_process"], config["data"]["seq_length"]
                cell = speed, f"{speed:,.0f}{mfu}, {gib:.0f} GiB, {config['training']['recompute']}"
                row_cells = by_row.setdefault(key, {})
                row_cells[length] = max(cell, row_cells.get(length, cell))
    return {key: {length: cell for length, (_, cell) in row_cells.items()} for key, row_cells in by_row.items()}


def _model(row: Mapping[str, Any]) -> str:
    config = row["configuration"]
    mixers = dict.fromkeys(parse_pattern(config["model"]["pattern"]))
    name = ", ".join(MIXERS[mixer] for mixer in mixers)
    if "top1_chunk" in mixers:
        name += f" {config['mixers'].get('top1_chunk', {}).get('score', 'exact')}"
    if config["model"]["block"] == "rwkv7":
        name += " in RWKV-7's block"
    if row["plain_megatron"]:
        name = "plain megatron-core"
    return name if config["training"]["fp8"] == "none" else f"{name}, fp8 {config['training']['fp8']}"


def _layout(parallel: Mapping[str, Any], processes: int) -> str:
    if processes == 1:
        return ""
    tensor, context = parallel["tensor"], parallel["context"]
    sizes = {"TP": tensor, "CP": context, "DP": processes // (tensor * context)}
    parts = [" x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)]
    if context > 1:
        exchange, transport = parallel.get("context_exchange", "auto"), parallel.get("context_transport", "nccl")
        rounds = parallel.get("context_exchange_rounds", 1)
        parts += [exchange] if exchange != "auto" else []
        parts += ["copy engines"] if transport == "copy_engine" else []
        parts += [f"{rounds} rounds"] if rounds > 1 else []
    return ", ".join(parts)


def markdown() -> str:
    """Return the Markdown table, sorted by kind of GPU, by model in the order of the reports, and by number of GPUs."""
    table_cells = cells()
    models = list(dict.fromkeys(model for model, _, _ in table_cells))
    keys = sorted(table_cells, key=lambda key: (key[1].split()[1] != KIND, models.index(key[0]), key[1]))
    rows = [[*key, *(table_cells[key].get(length, "") for length in LENGTHS)] for key in keys]
    return "\n".join(table(["", "GPUs", "layout", *(f"{length:,} tokens" for length in LENGTHS)], rows)) + "\n"


def replace_table(text: str) -> str:
    """Return the page with the table replaced by the current one."""
    page, tables = re.subn(r"(?<=<!-- table -->\n\n).*?\n(?=\n<!-- end -->)", markdown(), text, flags=re.DOTALL)
    assert tables == 1, f"{PAGE} has no marker for the table"
    return page


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
