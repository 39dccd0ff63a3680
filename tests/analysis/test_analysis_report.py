"""The report's files: a PNG that decodes, a table with the numbers, and a self-contained page."""

import base64
import csv
import json
import os
import re
import shutil
import struct
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from analysis_synthetic import Synthetic, write_run

from megatron_ext.analysis.figure import STACKED_SIZE, WIDE_SIZE, draw
from megatron_ext.analysis.matched import RESOLUTION, compare
from megatron_ext.analysis.matched_tables import COLUMNS
from megatron_ext.analysis.report import write_report
from megatron_ext.analysis.runs import read_runs
from megatron_ext.analysis.style import DARK, LIGHT
from megatron_ext.utils.errors import UserError

CHUNK = {"name": "chunk", "pattern": "top1_chunk*4", "mixers": {"top1_chunk": {"score": "exact"}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    runs = [
        Synthetic(name="<b>plain</b>", noise=0.02),
        Synthetic(name="second", noise=0.02, seed=2),
        Synthetic(**CHUNK, noise=0.02, gap=0.04, wobble=0.02, speed=0.9),
    ]
    return [write_run(root / str(index), run) for index, run in enumerate(runs)]


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    return write_report(folders, tmp_path_factory.mktemp("out") / "new" / "report")


@pytest.fixture(scope="module")
def page(written):
    parser = Page()
    parser.feed(written.read_text(encoding="utf-8"))
    return parser


class Page(HTMLParser):
    """Parser that collects all addresses of a page and its text, and checks that elements are closed."""

    VOID = ("meta", "img", "br", "source", "link")

    def __init__(self):
        super().__init__()
        self.addresses, self.tags, self.open, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def png_size(data):
    """Return width and height of a PNG after checking its chunks and the number of its pixels."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, pixels = 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", body[:10])
        pixels += body if kind == b"IDAT" else b""
        at += 12 + length
    channels = {2: 3, 6: 4}[color]
    assert depth == 8
    assert len(zlib.decompress(pixels)) == height * (1 + width * channels)
    return width, height


def test_writes_the_page_and_what_it_shows(written):
    assert written.name == "index.html"
    assert sorted(os.listdir(written.parent)) == [
        "domain_loss.csv",
        "domain_loss.png",
        "domain_shift.csv",
        "domain_shift.png",
        "index.html",
        "matched_loss.csv",
        "matched_loss.png",
        "matched_loss_drawn.csv",
        "report.json",
        "training_loss.csv",
        "training_loss.png",
    ]


def test_picture_decodes_and_has_its_size(written):
    assert png_size((written.parent / "matched_loss.png").read_bytes()) == tuple(
        round(150 * side) for side in WIDE_SIZE
    )


def test_page_needs_nothing_beside_it(page, written):
    assert page.open == []
    assert not {"link", "iframe"} & set(page.tags)
    pictures = [address for address in page.addresses if not address.startswith("#")]
    assert len(pictures) == 4 * 4
    sizes = set()
    for address in pictures:
        assert address.startswith("data:image/png;base64,")
        sizes.add(png_size(base64.b64decode(address.partition(",")[2], validate=True)))
    assert sizes >= {tuple(round(150 * side) for side in size) for size in (WIDE_SIZE, STACKED_SIZE)}
    text = written.read_text(encoding="utf-8")
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_page_says_what_the_table_holds(page, written):
    rows = list(csv.DictReader((written.parent / "matched_loss.csv").open()))
    (row,) = [
        row
        for row in rows
        if row["headline"] == "true"
        and (row["split"], row["domain"], row["architecture"]) == ("out_of_domain", "all", "top1_chunk (exact)")
    ]
    assert f"{float(row['gap']):+.4f}" in page.text
    assert f"{float(row['training_loss']):.4f}" in page.text
    words = " ".join(page.text.split())
    claim = "Top-1 Chunk with exact scores keeps the loss of attention out of domain"
    answer = "Contradicted" if float(row["gap_low"]) > RESOLUTION else "Not resolved"
    assert f"{claim} {answer} by top1_chunk (exact): {float(row['gap']):+.4f}" in words
    assert "one seed, for which the same spread is assumed" in words
    assert "<b>plain</b>" in page.text, "a run's name is text, not markup"


def test_table_is_tidy(written):
    rows = list(csv.DictReader((written.parent / "matched_loss.csv").open()))
    assert tuple(rows[0]) == COLUMNS
    keys = {(row["architecture"], row["split"], row["domain"], row["training_loss"]) for row in rows}
    assert len(keys) == len(rows) == 2 * (3 + 2) * 6
    for row in rows:
        assert float(row["gap_low"]) <= float(row["gap"]) <= float(row["gap_high"])
        assert row["seeds"] == ("2" if row["architecture"] == "attention" else "1")
        assert bool(row["seed_standard_deviation"]) == (row["seeds"] == "2")
        if row["architecture"] == "attention":
            assert float(row["gap"]) == 0.0


@pytest.mark.usefixtures("painted_once")
def test_same_runs_give_the_same_bytes(folders, written, tmp_path):
    """Pictures are compared as files. The page embeds them in variants, which are not drawn here and are left out."""
    again = write_report(folders, tmp_path)
    for name in set(os.listdir(written.parent)) - {"index.html"}:
        assert (again.parent / name).read_bytes() == (written.parent / name).read_bytes()
    pages = [re.sub(r"base64,[A-Za-z0-9+/=]+", "", page.read_text(encoding="utf-8")) for page in (written, again)]
    assert pages[0] == pages[1]


@pytest.mark.usefixtures("unpainted")
def test_replaces_an_earlier_report_and_leaves_other_files(folders, tmp_path):
    for name in ("index.html", "notes.txt"):
        (tmp_path / name).write_text("old")
    write_report(folders[:1], tmp_path)
    assert (tmp_path / "index.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "notes.txt").read_text() == "old"


@pytest.mark.usefixtures("painted_once")
def test_runs_without_a_common_training_loss(folders, tmp_path):
    """The page contains everything except the comparison, and names the runs without a common loss."""

    def above(step):
        return 9.0 - 0.001 * np.asarray(step)

    unmatched = write_run(
        tmp_path / "unmatched", Synthetic(name="<i>apart</i>", pattern="mamba*4", training_loss=above)
    )
    page = write_report([folders[0], unmatched], tmp_path / "report")
    text = " ".join(page.read_text(encoding="utf-8").split())
    # Evaluated at the mean of steps 1 to 20, ... 181 to 200.
    sentence = f"&lt;i&gt;apart&lt;/i&gt; was evaluated at training losses of {9 - 0.0105:.4f} to {9 - 0.1905:.4f}, "
    matched = text[text.index('<h2 id="matched">') : text.index('<h2 id="runs">')]
    assert text.count(sentence) == 1
    assert "8.8095</td>" in matched, "the ranges of all runs are a table"
    assert sentence in text[text.index('<div class="answer">') : text.index("<nav")]
    assert "nan" not in matched
    parser = Page()
    parser.feed(page.read_text(encoding="utf-8"))
    assert parser.open == []
    anchors = [address for address in parser.addresses if address.startswith("#")]
    assert {"#curves", "#matched", "#runs", "#configurations", "#history"} <= set(anchors)
    assert not {"#levels", "#domains"} & set(anchors)
    assert list(csv.DictReader((page.parent / "matched_loss.csv").open())) == []
    drawn = list(csv.DictReader((page.parent / "matched_loss_drawn.csv").open()))
    assert {(row["panel"], row["run"]) for row in drawn} == {("loss", "<b>plain</b>"), ("loss", "<i>apart</i>")}


@pytest.mark.usefixtures("unpainted")
def test_full_disk_leaves_the_earlier_report_whole(folders, tmp_path, monkeypatch):
    (tmp_path / "matched_loss.png").write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        write_report(folders[:1], tmp_path)
    problem = "the report cannot be written (No space left on device)"
    assert str(caught.value) == f"{tmp_path}: {problem}; give another folder with --output or free disk space"
    assert os.listdir(tmp_path) == ["matched_loss.png"]
    assert (tmp_path / "matched_loss.png").read_text() == "old"


@pytest.mark.usefixtures("unpainted")
def test_output_that_is_a_file(folders, tmp_path):
    (tmp_path / "report").write_text("")
    with pytest.raises(UserError, match=r"report: the report cannot be written \(File exists\)"):
        write_report(folders[:1], tmp_path / "report")


def test_damaged_run_writes_nothing(folders, tmp_path):
    with pytest.raises(UserError):
        write_report([*folders, tmp_path / "none"], tmp_path / "report")
    assert not (tmp_path / "report").exists()


@pytest.mark.usefixtures("painted_once")
def test_one_architecture_and_no_in_domain_evaluation(tmp_path):
    folder = write_run(tmp_path / "run", Synthetic(documents={"code": 12}))
    text = write_report([folder], tmp_path / "report").read_text(encoding="utf-8")
    assert "there is nothing to compare it with yet" in text
    assert "Fewer than 20 documents: code" in text
    assert "loss in domain" not in text


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_more_architectures_than_colours(tmp_path, theme):
    runs = [Synthetic(mixers={"attention": {"window": 8 * (index + 1)}}) for index in range(9)]
    folders = [write_run(tmp_path / str(index), run) for index, run in enumerate(runs)]
    assert png_size(draw(compare(read_runs(folders)), theme))


@pytest.mark.usefixtures("painted_once")
def test_test_text_of_training_domains_stands_apart(folders, written, tmp_path):
    """Test text of training domains changes no other number: neither the out-of-domain losses nor validation."""
    copies = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    for copy in copies:
        lines = [json.loads(line) for line in (copy / "evaluation.jsonl").open()]
        for line in [line for line in lines if line["domain"] == "web"]:
            harder = [nats + 0.25 * n for nats, n in zip(line["document_loss"], line["document_tokens"], strict=True)]
            lines.append({**line, "split": "test_in_domain", "loss": line["loss"] + 0.25, "document_loss": harder})
        (copy / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(copies, tmp_path / "report")
    before, after = (list(csv.DictReader((one.parent / "matched_loss.csv").open())) for one in (written, page))
    assert [row for row in after if row["split"] != "in_domain_test"] == before
    losses = {
        split: [float(row["loss"]) for row in after if (row["split"], row["domain"]) == (split, "all")]
        for split in ("in_domain", "in_domain_test")
    }
    assert losses["in_domain_test"] == pytest.approx([loss + 0.25 for loss in losses["in_domain"]], abs=2e-6)
    assert len(losses["in_domain"]) == 2 * 6
    text = page.read_text(encoding="utf-8")
    assert 'web</th> <td class="name">in domain test</td>' in " ".join(text.split())
    assert "in domain test: those in the" in text
    assert "in domain test" not in written.read_text(encoding="utf-8")
    picture = png_size((page.parent / "matched_loss.png").read_bytes())
    assert picture == (round(150 * 1.4 * WIDE_SIZE[0]), round(150 * WIDE_SIZE[1]))
