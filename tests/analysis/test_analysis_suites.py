"""What suites found of runs stands in the report: pictures, tables, and the same numbers as JSON."""

import base64
import json

import pytest
from analysis_synthetic import Synthetic, write_run

from megatron_ext.analysis.report import write_report
from megatron_ext.errors import UserError

PICTURE = b"\x89PNG\r\n\x1a\n a picture"


def retrieval(step, score):
    mean = {"task": "passkey", "length": 512, "depth": None, "samples": 4, "score": score, "low": 0.25, "high": 0.75}
    return {
        "run": "a",
        "step": step,
        "confidence": 0.9,
        "by_length": [mean],
        "by_depth": [mean | {"depth": 0.5}],
        "records": [],
    }


def fewshot(step, value):
    metric = {"name": "acc", "filter": "none", "value": value, "stderr": 0.0125, "higher_is_better": True}
    word = {"name": "alias", "filter": "none", "value": " - piqa", "stderr": None, "higher_is_better": None}
    task = {"name": "piqa", "num_fewshot": 5, "rows": 9, "metrics": [metric, word]}
    return {"step": step, "tasks": {"piqa": task}}


def write(folder, step, name, content, picture=None):
    inside = folder / "evaluation" / f"step_{step}"
    inside.mkdir(parents=True, exist_ok=True)
    (inside / f"{name}.json").write_text(json.dumps(content))
    if picture is not None:
        (inside / f"{name}.png").write_bytes(picture)


@pytest.fixture
def folders(tmp_path):
    runs = [Synthetic(name="<plain>"), Synthetic(name="chunk", pattern="top1_chunk*4")]
    return [write_run(tmp_path / str(index), run) for index, run in enumerate(runs)]


def test_the_newest_results_of_each_run_are_shown(folders, tmp_path):
    for step, score in ((20, 0.1), (100, 0.5), (9, 0.9)):
        write(folders[0], step, "retrieval", retrieval(step, score), PICTURE + b" %d" % step)
    write(folders[1], 40, "retrieval", retrieval(40, 0.375))
    write(folders[1], 60, "fewshot", fewshot(60, 0.6125))
    page = write_report(folders, tmp_path / "out").read_text()
    numbers = json.loads((tmp_path / "out" / "suites.json").read_text())
    assert [(one["run"], one["step"], one["by_length"][0]["score"]) for one in numbers["retrieval"]] == [
        ("<plain>", 100, 0.5),
        ("chunk", 40, 0.375),
    ]
    assert numbers["fewshot"][0]["tasks"]["piqa"]["metrics"][0]["value"] == 0.6125
    assert base64.b64encode(PICTURE + b" 100").decode() in page
    assert base64.b64encode(PICTURE + b" 20").decode() not in page
    squeezed = " ".join(page.split())
    assert "passkey, 512 tokens</th> <td>50.0 <small>25.0 to 75.0</small></td><td>37.5 " in squeezed
    assert "Wilson&#39;s interval of 90 %, over all depths" in squeezed
    assert "piqa, 5-shot: acc</th> <td>0.6125 <small>\u00b1 0.0125</small></td>" in squeezed
    assert "&lt;plain&gt;: attention, step 100" in page


def test_a_run_without_tests_leaves_nothing(folders, tmp_path):
    out = tmp_path / "out"
    write(folders[0], 20, "fewshot", fewshot(20, 0.5))
    write_report(folders, out)
    (folders[0] / "evaluation" / "step_20" / "fewshot.json").unlink()
    page = write_report(folders, out).read_text()  # over the one before
    assert "Few-shot" not in page
    assert "Retrieval" not in page
    assert not (out / "suites.json").exists()


def test_a_damaged_file_is_named(folders, tmp_path):
    write(folders[1], 20, "retrieval", {"step": 20})
    with pytest.raises(UserError, match=r"1/evaluation/step_20/retrieval\.json: is not what a suite has written; "):
        write_report(folders, tmp_path / "out")
