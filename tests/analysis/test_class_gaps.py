"""Gaps by class of token: a known gap on some tokens is found there at matched loss, and nowhere else."""

import json
from pathlib import Path

import numpy as np
import pytest
from analysis_synthetic import Synthetic, write_run

from megatron_ext.analysis.class_gaps import class_gaps, class_tables, read_losses
from megatron_ext.analysis.matched import compare
from megatron_ext.analysis.runs import read_runs
from megatron_ext.utils.errors import UserError

EVERY = {"training": {"evaluate_classes": "every"}}
SEEN_GAP = 0.4


def write_with_classes(folder: Path, run: Synthetic) -> Path:
    """Write a run whose gap out of domain is on a quarter of the tokens alone, those of the class `token/seen`."""
    write_run(folder, run)
    path = folder / "evaluation.jsonl"
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        tokens, nats = np.array(record["document_tokens"]), np.array(record["document_loss"])
        seen = tokens // 4
        extra = (run.gap / 0.25) * seen * (record["split"] == "test")
        own = nats - extra - run.gap * (tokens - 4 * seen) * (record["split"] == "test")
        classes = {"token/seen": (seen, own * seen / tokens + extra)}
        classes["token/unseen"] = (tokens - seen, nats - classes["token/seen"][1])
        record["classes"] = {
            name: {"document_loss": loss.tolist(), "document_tokens": count.tolist()}
            for name, (count, loss) in classes.items()
        }
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return folder


@pytest.fixture
def folders(tmp_path):
    runs = [
        Synthetic(config=EVERY),
        Synthetic(name="delta", pattern="gated_deltanet*4", gap=SEEN_GAP / 4, speed=0.9, config=EVERY),
    ]
    return [write_with_classes(tmp_path / run.name, run) for run in runs]


def test_the_gap_is_on_the_tokens_that_have_it(folders):
    comparison = compare(read_runs(folders))
    losses_of = read_losses(comparison)
    (found,) = class_gaps(comparison, "test", losses_of).values()
    gaps = {gap.name: gap for gap in found}
    assert gaps["token/seen"].gap.value[0] == pytest.approx(SEEN_GAP, abs=0.01)  # documents of 4 n + 1 to 3 tokens
    assert gaps["token/unseen"].gap.value[0] == pytest.approx(0.0, abs=0.01)
    assert gaps["token/seen"].share == pytest.approx(0.25, abs=0.01)
    whole = comparison.select("test")[1]
    parts = sum(gap.share * gap.gap.value[0] for gap in found)
    assert parts == pytest.approx(whole.gap.value[comparison.headline], abs=1e-9)
    assert gaps["token/seen"].gap.low[0] > 0.3
    in_domain = class_gaps(comparison, "validation", losses_of)["gated_deltanet"]
    assert [gap.gap.value[0] for gap in in_domain] == pytest.approx([0.0, 0.0], abs=1e-9)
    names = [row[0].text for row in class_tables(comparison)["test"].rows]
    assert names == ["token/seen", "token/unseen"]


def test_without_classes_at_every_evaluation_there_is_no_table(folders):
    lines = (folders[1] / "evaluation.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    del first["classes"]
    (folders[1] / "evaluation.jsonl").write_text("\n".join([json.dumps(first), *lines[1:], ""]))
    comparison = compare(read_runs(folders))
    split = first["split"]
    assert class_gaps(comparison, split, read_losses(comparison)) == {}
    assert class_tables(comparison)[split].rows == []


def test_classes_of_other_documents_are_refused(folders):
    lines = [json.loads(line) for line in (folders[1] / "evaluation.jsonl").read_text().splitlines()]
    runs = read_runs(folders)
    lines[-1]["documents"] = [number + 1 for number in lines[-1]["documents"]]
    (folders[1] / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=f"classes of {lines[-1]['domain']} at step 200 are of other documents"):
        class_tables(compare(runs))


def test_a_class_in_few_documents_has_an_interval(folders):
    """One of two domains has the class in two documents: its stratum is merged with the other domain's."""
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
        for line in (line for line in lines if line["domain"] == "maths"):
            seen, number = line["classes"]["token/seen"], len(line["documents"])
            for name in ("document_tokens", "document_loss"):
                seen[name] = seen[name][:2] + [0] * (number - 2)
        (folder / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparison = compare(read_runs(folders))
    (found,) = class_gaps(comparison, "test", read_losses(comparison)).values()
    assert np.isfinite(found[0].gap.low[0])


def test_the_matched_loss_has_no_gaps(folders):
    comparison = compare(read_runs(folders), match="validation")
    assert class_gaps(comparison, "validation", read_losses(comparison)) == {}
