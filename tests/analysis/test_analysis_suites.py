"""Suite results in the report: pictures, tables, and the same numbers as JSON."""

import base64
import csv
import json

import pytest
from analysis_synthetic import Synthetic, write_run
from browser import missing

from megatron_ext.analysis.report import write_report
from megatron_ext.evaluation.domain_results import DomainLoss, DomainOptions, write_domains
from megatron_ext.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("unpainted")

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


def a_loss(domain, split, loss, documents=1234, **more):
    fields = {"interval": (loss - 0.125, loss + 0.0625), "loss_per_byte": loss / 4, "bits_per_byte": loss / 2}
    return DomainLoss(domain, split, documents, 100 * documents, loss, **(fields | more))


def write_losses(folder, step, *losses, confidence=0.95):
    """Write domains.json as `selectron evaluate` does, and return its content."""
    inside = folder / "evaluation" / f"step_{step}"
    inside.mkdir(parents=True)
    about = {"run": "a", "step": step, "tokens": 9}
    write_domains(losses, DomainOptions(confidence=confidence), about, inside)
    return json.loads((inside / "domains.json").read_text())


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
    scores = '<td data-value="0.5">50.0 <small>25.0 to 75.0</small></td> <td data-value="0.375">37.5 '
    assert f"passkey, 512 tokens</th> {scores}" in squeezed
    assert "Wilson&#39;s interval of 90 %, over all depths" in squeezed
    assert 'piqa, 5-shot: acc</th> <td data-value="0.6125">0.6125 <small>\u00b1 0.0125</small></td>' in squeezed
    assert "&lt;plain&gt;: attention, step 100" in page
    assert (tmp_path / "out" / "retrieval__plain_.png").read_bytes() == PICTURE + b" 100"
    rows = list(csv.DictReader((tmp_path / "out" / "retrieval.csv").open()))
    assert [(row["run"], row["step"], row["length"], row["depth"], row["score"]) for row in rows] == [
        ("<plain>", "100", "512", "", "0.5"),
        ("<plain>", "100", "512", "0.5", "0.5"),
        ("chunk", "40", "512", "", "0.375"),
        ("chunk", "40", "512", "0.5", "0.375"),
    ]
    scores = list(csv.DictReader((tmp_path / "out" / "fewshot.csv").open()))
    assert [(row["task"], row["num_fewshot"], row["name"], row["value"], row["stderr"]) for row in scores] == [
        ("piqa", "5", "acc", "0.6125", "0.0125"),
        ("piqa", "5", "alias", " - piqa", ""),
    ]


def test_a_run_without_tests_leaves_nothing(folders, tmp_path):
    out = tmp_path / "out"
    write(folders[0], 20, "fewshot", fewshot(20, 0.5))
    write_report(folders, out)
    (folders[0] / "evaluation" / "step_20" / "fewshot.json").unlink()
    page = write_report(folders, out).read_text()  # overwrites the previous report
    assert "Few-shot" not in page
    assert "Test loss by domain" not in page
    assert "Retrieval" not in page
    for name in ("suites.json", "fewshot.csv", "retrieval.csv", "domains.csv"):
        assert not (out / name).exists()


@pytest.fixture
def tested(folders):
    """Newest domains.json of each run. One domain was read partially, and one has a single document."""
    write_losses(folders[0], 20, a_loss("<web>", "validation", 9.5))
    plain = [
        a_loss("<web>", "validation", 3.25),
        a_loss("code", "test", 4.5, documents=12),
        a_loss("<web>", "test_in_domain", 3.5, bits_per_byte=None, loss_per_byte=None),
    ]
    chunk = [a_loss("<web>", "validation", 3.125), a_loss("code", "test", 4.75, documents=1, interval=None)]
    return [write_losses(folders[0], 100, *plain), write_losses(folders[1], 60, *chunk, confidence=0.8)]


PLAIN, CHUNK = "<plain>: attention", "chunk: top1_chunk (exact)"
LOSSES = [
    ["code", "out of domain", PLAIN, "100", "4.5000 4.3750 to 4.5625", "2.2500", "12", "1\u202f200"],
    ["code", "out of domain", CHUNK, "60", "4.7500", "2.3750", "1", "100"],
    ["<web>", "in domain", PLAIN, "100", "3.2500 3.1250 to 3.3125", "1.6250", "1\u202f234", "123\u202f400"],
    ["<web>", "in domain", CHUNK, "60", "3.1250 3.0000 to 3.1875", "1.5625", "1\u202f234", "123\u202f400"],
    ["<web>", "in domain test", PLAIN, "100", "3.5000 3.3750 to 3.5625", "\u2013", "1\u202f234", "123\u202f400"],
]
SPLITS = {"out_of_domain": "test", "in_domain": "validation", "in_domain_test": "test_in_domain"}


def test_losses_by_domain_are_those_of_the_file(folders, tested, tmp_path):
    out = tmp_path / "out"
    page = " ".join(write_report(folders, out).read_text().split())
    assert "Losses with intervals of 95 % or 80 % over documents; " in page
    section = page[page.index('<h2 id="losses">') : page.index('<h2 id="runs">')]
    assert (
        "Fewer than 20 documents: code. Their intervals are rough, and fewer than three documents have no interval."
        in section
    )
    found = {"<plain>": {}, "chunk": {}}
    for row in csv.DictReader((out / "domains.csv").open()):
        numbers = {name: float(row[name]) if row[name] else None for name in list(row)[5:]}
        found[row["run"]][int(row["step"]), row["domain"], SPLITS[row["split"]]] = numbers
    for name, file in zip(found, tested, strict=True):
        assert found[name] == {
            (file["step"], one["domain"], one["split"]): {
                "documents": one["documents"],
                "tokens": one["tokens"],
                "loss": one["loss"],
                "loss_low": one["interval"][0] if one["interval"] else None,
                "loss_high": one["interval"][1] if one["interval"] else None,
                "nats_per_byte": one["loss_per_byte"],
                "bits_per_byte": one["bits_per_byte"],
            }
            for one in file["domains"]
        }
    reported = json.loads((out / "suites.json").read_text())["domains"]
    assert [(one["run"], one["step"], one["options"]["confidence"]) for one in reported] == [
        ("<plain>", 100, 0.95),
        ("chunk", 60, 0.8),
    ]
    assert all(one.pop("first_tokens") == 0 for file in tested for one in file["domains"])  # not a column of the report
    assert [one["domains"] for one in reported] == [file["domains"] for file in tested]


TABLE = """
const rows = [...document.querySelector("#losses ~ .wide table").tBodies[0].rows];
return rows.map(row => [...row.cells].map(cell => cell.innerText.replace(/[ \\n]+/g, " ")))
"""


@pytest.mark.skipif(bool(missing()), reason=missing() or "never")
@pytest.mark.usefixtures("painted_once")
def test_losses_by_domain_in_a_browser(folders, tested, tmp_path, window):
    page = write_report(folders, tmp_path / "out")
    for width in (1280, 390):
        window.show(width)
        window.open(page)
        assert window.complaints() == []
        assert window.run(TABLE) == LOSSES
        page_width, screen = window.run("const d = document.documentElement; return [d.scrollWidth, d.clientWidth]")
        assert page_width <= screen <= width
    assert window.run("return document.querySelector('nav a[href=\"#losses\"]').innerText") == "Test loss by domain"
    window.show(1280)
    window.press("#losses ~ .wide th:nth-child(6) button")
    bits = [row[5] for row in LOSSES if row[5] != "\u2013"]
    assert [row[5] for row in window.run(TABLE)] == [*sorted(bits, key=float), "\u2013"]  # unknown values come last


def test_a_diverged_run_has_no_numbers(folders, tmp_path):
    nan = float("nan")
    write_losses(folders[0], 100, a_loss("code", "test", nan, interval=(nan, nan)))
    page = " ".join(write_report(folders, tmp_path / "out").read_text().split())
    assert "nan" not in page[page.index('<h2 id="losses">') : page.index('<h2 id="runs">')]


@pytest.mark.parametrize("name", ["domains", "retrieval", "fewshot"])
def test_a_damaged_file_is_named(folders, tmp_path, name):
    write(folders[1], 20, name, {"step": 20})
    with pytest.raises(UserError, match=rf"1/evaluation/step_20/{name}\.json: was not written by a suite; "):
        write_report(folders, tmp_path / "out")
