"""The manifest accounts for every record of the input: it is kept, left out, skipped or unused."""

from pathlib import Path

import pytest
from prep_fakes import UNFILTERED, lines, options, record, text, write_jsonl

from data_prep.contamination.overlap import OverlapOptions
from data_prep.manifest import Manifest, UnusedEntry, load_manifest, match_domain
from data_prep.prepare import prepare
from data_prep.splits import UNUSED_REASON, SplitPlan
from data_prep.stages import Filtering
from data_prep.summary import format_summary

MISPLACED = "tested on, but in the folder {}"


def accounted(manifest: Manifest) -> int:
    used = sum(entry.documents for entry in manifest.domains)
    dropped = sum(entry.documents for entry in (*manifest.left_out, *manifest.unused))
    return used + dropped + sum(entry.records for entry in manifest.skipped)


def unused(manifest: Manifest) -> dict[tuple[str, str], int]:
    return {(entry.domain, entry.reason): entry.documents for entry in manifest.unused}


def split_by_folders(root: Path) -> int:
    """Write train, validation and test files with records of every kind, and return the number of records."""
    leaked = text("leaked", 60)
    content = {
        "train/a": [*lines(["C4", "ArXiv", "Foo"], 5), record("C4", "\0\0"), "{", record("C4", f"{leaked} and more")],
        "train/b": [*lines(["C4"], 5), *lines(["Foo", "Law"], 10, "b ")],
        "validation/a": lines(["c4", "ArXiv"], 4, "validation "),
        "test/a": [*lines(["ArXiv", "C4", "Foo"], 6, "test "), record("ArXiv", leaked), '{"text": "no domain"}'],
    }
    for name, records in content.items():
        write_jsonl(root / f"{name}.jsonl", records)
    return sum(map(len, content.values()))


@pytest.mark.parametrize(("overlap", "tasks"), [("report", 1), ("drop_test", 3), ("drop_train", 3)])
def test_kept_left_out_skipped_and_unused_are_all_records(tmp_path, tokenizer_file, overlap, tasks):
    number = split_by_folders(tmp_path / "raw")
    filtering = Filtering(duplicates="near", overlap=OverlapOptions(action=overlap, threshold=0.5))
    changes = {"train_domains": ["C4"], "on_error": "skip", "filtering": filtering, "tasks": tasks}
    manifest = prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **changes))
    assert load_manifest(tmp_path / "out") == manifest
    assert accounted(manifest) == number
    assert {"empty", "exact duplicate"} <= {entry.reason for entry in manifest.left_out}
    assert sum(entry.records for entry in manifest.skipped) == 2
    assert unused(manifest) == {
        ("ArXiv", MISPLACED.format("train")): 5,
        ("ArXiv", MISPLACED.format("validation")): 4,
        ("Foo", UNUSED_REASON): 5 + 10 + 6,
        ("Law", UNUSED_REASON): 10,
    }
    printed = format_summary(manifest, str(tmp_path / "out")).splitlines()
    assert f"not used: 21 of Foo ({UNUSED_REASON})" in printed
    assert "not used: 5 of ArXiv (tested on, but in the folder train)" in printed


def test_where_the_hash_splits_and_nothing_is_filtered(records, tmp_path, tokenizer_file):
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file, filtering=UNFILTERED))
    assert accounted(manifest) == 3 * 20 + 3 * 15
    assert manifest.unused == [UnusedEntry("Book", UNUSED_REASON, 15)]
    everything = {"train_domains": ["C4", "CommonCrawl", "Book"], "filtering": UNFILTERED}
    manifest = prepare(options(records, tmp_path / "all", tokenizer_file, **everything))
    assert (accounted(manifest), manifest.unused) == (105, [])
    assert "not used" not in format_summary(manifest, "")


@pytest.mark.parametrize(
    ("named", "first"), [(["C4"], "c4"), (["c4"], "C4"), (["RedPajamaC4"], "c4"), (None, "C4"), (None, "c4")]
)
def test_spellings_of_a_domain_are_one_domain(tmp_path, tokenizer_file, named, first):
    """A name selects all of its spellings, and documents get a single one. Some file systems ignore case."""
    other = "c4" if first == "C4" else "C4"
    content = [*lines([first], 12), *lines([other], 8), *lines(["ARXIV"], 4), *lines(["arxiv"], 3)]
    source = write_jsonl(tmp_path / "x.jsonl", content)
    changes = {"train_domains": named, "validation_fraction": 0.0, "filtering": UNFILTERED}
    manifest = prepare(options(source, tmp_path / "out", tokenizer_file, **changes))
    spelling = "C4" if named is None else first
    assert [(entry.split, entry.domain, entry.documents) for entry in manifest.domains] == [
        ("train", spelling, 20),
        ("test", "ARXIV", 7),
    ]
    assert manifest.unused == []
    assert sorted(path.name for path in (tmp_path / "out/train").iterdir()) == [spelling]
    assert "no documents in: C4" not in format_summary(manifest, "")


@pytest.mark.parametrize("name", ["C4", "c4", "RedPajamaC4", "redpajamac4", "C5", "Book", "redpajamabook", "Straße"])
def test_the_plan_knows_a_domain_as_users_names_are_known(name):
    plan = SplitPlan(frozenset({"C4", "STRASSE"}), frozenset({"Book"}), frozenset(), 0.0)
    assert plan.split_without_text(name, None) == (
        "train" if match_domain(name, plan.train) else "test" if match_domain(name, plan.test) else None
    )
    assert plan.canonical_name(name) == (match_domain(name, plan.train | plan.test) or name)


def test_of_many_domains_the_largest_have_a_line(records, tmp_path, tokenizer_file):
    write_jsonl(
        records / "c.jsonl",
        [record(f"D{number}", text(f"{number} {i}")) for number in range(30) for i in range(number + 1)],
    )
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file, filtering=UNFILTERED))
    printed = [line for line in format_summary(manifest, "").splitlines() if line.startswith("not used: ")]
    assert printed[0] == f"not used: 30 of D29 ({UNUSED_REASON})"
    assert printed[-1] == "not used: 66 of 11 more domains, which the manifest lists"
    assert (len(printed), len(manifest.unused)) == (21, 31)
