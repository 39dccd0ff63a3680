import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document
from pipelines import FailsOnce, Given, document, read, run, run_here

from data_prep.contamination import findings, runs
from data_prep.contamination.decontamination import Decontamination, DocumentSource, build_decontamination
from data_prep.contamination.overlap import OverlapOptions
from data_prep.contamination.overlap_filter import DropContaminated
from megatron_ext.utils.errors import UserError

generator = random.Random(3)
VOCABULARY = ["".join(generator.choices(string.ascii_lowercase, k=5)) for _ in range(3000)]


def words(number: int, seed: object) -> list[str]:
    return random.Random(str(seed)).choices(VOCABULARY, k=number)


def run_search(documents: list[Document], folder: Path, tasks: tuple[int, int] = (1, 1), **options: Any) -> Any:
    """Run all stages over documents, and return the decontamination and its report."""
    test, train = (DocumentSource([Given(documents)], number) for number in tasks)
    built = build_decontamination(test, train, str(folder), OverlapOptions(**options))
    run_here(built.stages)
    return built, json.loads((folder / "report.json").read_text())


def left(built: Decontamination, documents: list[Document], tasks: int = 1) -> tuple[set[str], dict[str, float]]:
    remaining = {document.id for document in read([Given(documents), built.drop], tasks)}
    return remaining, {
        name: metric.total for name, metric in built.drop.stats.stats.items() if name.startswith("dropped")
    }


def report_on(test: str, *train: str, folder: Path) -> dict[str, Any]:
    documents = [document(test, "t:1", "test", "ArXiv"), *(document(x, f"c:{i}") for i, x in enumerate(train))]
    return run_search(documents, folder)[1]["domains"][0]


TEXT = words(40, "text")


@pytest.mark.parametrize(
    ("test", "train", "short", "hits"),
    [
        (TEXT[:12], [TEXT], 1, 0),
        (TEXT[:13], [TEXT], 0, 1),
        (TEXT[:13], [TEXT[:12]], 0, 0),
        ([*TEXT[:12], "different", *TEXT[13:25]], [TEXT], 0, 0),
        ([*TEXT[:13], "different", *TEXT[14:27]], [TEXT], 0, 2),
        (["before", *TEXT[20:34], "after"], [TEXT], 0, 2),
        (TEXT[:13], [["else", *TEXT[:6]], [*TEXT[6:13], "else"]], 0, 0),
        (TEXT[:13], [[*TEXT[1:13], TEXT[0]]], 0, 0),
        ([f"{w.upper()}," for w in TEXT[:13]], [[f"“{w}”" for w in TEXT]], 0, 1),
        ([*TEXT[:6], "—", "...", *TEXT[6:13]], [[*TEXT[:9], "\n\n", *TEXT[9:]]], 0, 1),
        (TEXT, [TEXT], 0, 28),
        ([], [TEXT], 1, 0),
        (TEXT, [[]], 0, 0),
    ],
)
def test_at_the_boundaries(tmp_path, test, train, short, hits):
    entry = report_on(" ".join(test), *(" ".join(x) for x in train), folder=tmp_path)
    assert (entry["documents"], entry["short"], entry["ngrams_in_train"]) == (1, short, hits)
    assert entry["with_overlap"] == entry["contaminated"] == int(hits > 0)
    assert entry["dropped"] == 0


def corpus() -> list[Document]:
    """Return training documents, and test and validation documents, some of which contain runs of training text."""
    generator = random.Random(11)
    train = [words(generator.randrange(5, 120), ("train", i)) for i in range(60)]
    train[40][10:40] = train[7][:30]
    documents = [document(" ".join(text), f"train/{i % 4}.jsonl:{i}") for i, text in enumerate(train)]
    for i in range(50):
        text = words(generator.randrange(3, 90), ("test", i))
        for _ in range(i % 4):
            source = generator.choice([7, *range(60)])
            start, length = generator.randrange(40), generator.randrange(10, 30)
            place = generator.randrange(len(text))
            text[place : place + generator.randrange(5)] = train[source][start : start + length]
        split = "validation" if i % 10 == 9 else "test"
        styled = " ".join(word.title() + generator.choice(["", "", ",", "."]) for word in text)
        documents.append(document(styled, f"held/{i % 3}.jsonl:{i}", split, generator.choice(["ArXiv", "Book"])))
    return documents


def brute_force(documents: list[Document], splits: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Compute the report of each test document with sets of word tuples."""

    def runs(given: Document) -> list[tuple[str, ...]]:
        plain = "".join(c for c in given.text.lower() if c not in string.punctuation).split()
        return [tuple(plain[i : i + 13]) for i in range(len(plain) - 12)]

    train = [given for given in documents if given.metadata["split"] == "train"]
    train.sort(key=lambda given: (given.metadata["source"], int(given.id.split(":")[1])))
    of_train = [(other.id, runs(other)) for other in train]
    all_of_train = {run for _, there in of_train for run in there}
    found: dict[str, dict[str, Any]] = {}
    for given in documents:
        if given.metadata["split"] in splits:
            own = runs(given)
            hit = [run in all_of_train for run in own]
            longest = max((len(part) for part in "".join("x" if h else " " for h in hit).split()), default=0)
            first = hit.index(True) if any(hit) else None
            found[given.id] = {
                "ngrams": len(own),
                "ngrams_in_train": sum(hit),
                "longest_overlap_words": longest + 12 if longest else 0,
                "example": None if first is None else " ".join(own[first]),
                "train_id": None if first is None else next(name for name, there in of_train if own[first] in there),
                "holders": {name for name, there in of_train if set(there) & set(own)},
                "domain": given.metadata["domain"],
                "split": given.metadata["split"],
            }
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    found = brute_force(corpus(), ("test",))
    assert 10 < sum(entry["ngrams_in_train"] > 0 for entry in found.values()) < 35
    return found


@pytest.mark.parametrize("tasks", [(1, 1), (2, 3)])
def test_report_equals_brute_force(tmp_path, expected, tasks):
    documents = corpus()
    _, report = run_search(documents, tmp_path, tasks, worst=1000)
    for domain in ("ArXiv", "Book"):
        ours = [entry for entry in expected.values() if entry["domain"] == domain]
        ngrams, hits = (sum(entry[name] for entry in ours) for name in ("ngrams", "ngrams_in_train"))
        (entry,) = [entry for entry in report["domains"] if entry["domain"] == domain]
        assert entry == {
            "split": "test",
            "domain": domain,
            "documents": len(ours),
            "short": sum(entry["ngrams"] == 0 for entry in ours),
            "with_overlap": sum(entry["ngrams_in_train"] > 0 for entry in ours),
            "ngrams": ngrams,
            "ngrams_in_train": hits,
            "contaminated": sum(entry["ngrams_in_train"] > 0 for entry in ours),
            "dropped": 0,
            "share": pytest.approx(hits / ngrams),
        }
    records = {record["id"]: record for record in report["worst"]}
    assert set(records) == {name for name, entry in expected.items() if entry["ngrams_in_train"]}
    for name, record in records.items():
        entry = {key: value for key, value in expected[name].items() if key != "holders"}
        assert {key: record[key] for key in entry} == entry
    holders = set().union(*(entry["holders"] for entry in expected.values()))
    assert report["train"] == {"documents": 60, "overlapping": len(holders)}


def test_worst_documents_are_limited_and_sorted(tmp_path, expected):
    _, report = run_search(corpus(), tmp_path, worst=2)
    for domain in ("ArXiv", "Book"):
        shares = sorted(
            (x["ngrams_in_train"] / x["ngrams"] for x in expected.values() if x["domain"] == domain and x["ngrams"]),
            reverse=True,
        )
        assert [x["share"] for x in report["worst"] if x["domain"] == domain] == pytest.approx(shares[:2])


def test_several_splits_can_be_tested(tmp_path):
    documents = corpus()
    _, report = run_search(documents, tmp_path, splits=("validation", "test"))
    expected = brute_force(documents, ("validation", "test"))
    hits = sum(entry["ngrams_in_train"] for entry in expected.values() if entry["split"] == "validation")
    assert hits > 0
    assert hits == sum(x["ngrams_in_train"] for x in report["domains"] if x["split"] == "validation")


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("action", ["report", "drop_test", "drop_train"])
def test_action_determines_the_dropped_documents(tmp_path, expected, action, threshold):
    documents = corpus()
    built, report = run_search(documents, tmp_path, action=action, threshold=threshold)
    remaining, counts = left(built, documents)
    bad = {name for name, entry in expected.items() if entry["ngrams_in_train"] > threshold * entry["ngrams"]}
    assert sum(entry["contaminated"] for entry in report["domains"]) == len(bad) > 0
    dropped = {
        "report": set(),
        "drop_test": bad,
        "drop_train": set().union(*(expected[name]["holders"] for name in bad)),
    }[action]
    assert {given.id for given in documents} - remaining == dropped
    assert counts.get("dropped", 0) == len(dropped)
    assert sum(entry["dropped"] for entry in report["domains"]) == (len(bad) if action == "drop_test" else 0)
    if action == "drop_train":
        assert counts["dropped_contaminated_train_C4"] == len(dropped)


@pytest.mark.parametrize("splits", [("test",), ("test", "validation")])
def test_drop_requires_the_number_of_judging_tasks(tmp_path, splits):
    documents = corpus()
    built, _ = run_search(documents, tmp_path / "one", action="drop_test", splits=splits)
    remaining, counts = left(built, documents)
    bad = {name for name, entry in brute_force(documents, splits).items() if entry["ngrams_in_train"]}
    assert remaining == {given.id for given in documents} - bad
    built, _ = run_search(documents, tmp_path / "three", (3, 2), action="drop_test", splits=splits)
    assert left(built, documents, 3)[0] == remaining
    assert counts["dropped"] == len(bad)


def test_drop_rejects_other_documents(tmp_path):
    documents = corpus()
    test = [given for given in documents if given.metadata["split"] == "test"]
    built, _ = run_search(documents, tmp_path / "two", (2, 2), action="drop_test")
    built.drop.judged.rm("00001.jsonl")
    with pytest.raises(UserError, match=r"judged/00001\.jsonl: is missing; judge"):
        left(built, documents, 2)
    built, _ = run_search(documents, tmp_path / "one", action="drop_test")
    others = {
        test[-1].id: test[::-1],
        "the end": [given for given in documents if given is not test[-1]],
        test[1].id: [given for given in documents if given is not test[0]],
        "new:1": [*documents, document("a", "new:1", "test")],
    }
    for first, given in others.items():
        with pytest.raises(UserError, match=f"differ from those that were judged, starting at {first}; remove"):
            left(built, given)
    train = [given for given in documents if given.metadata["split"] == "train"]
    assert left(built, [*test, *train])[0] == left(built, [*train[::-1], *test])[0]


def test_share_equal_to_the_threshold(tmp_path):
    text = [*TEXT[:14], *words(12, "own")]  # 14 n-grams, 2 of them in train
    documents = [document(" ".join(text), "t:1", "test"), document(" ".join(TEXT), "c:1")]
    for threshold, contaminated in ((2 / 14, 0), (2 / 14 - 1e-9, 1)):
        _, report = run_search(documents, tmp_path / str(threshold), threshold=threshold)
        assert report["domains"][0]["ngrams"] == 14
        assert report["domains"][0]["contaminated"] == contaminated


def test_interrupted_search_gives_the_same_report(tmp_path):
    documents = corpus()
    _, expected = run_search(documents, tmp_path / "whole")
    test = DocumentSource([Given(documents)], 2)
    train = DocumentSource([Given(documents), FailsOnce(tmp_path / "mark")], 3)
    built = build_decontamination(test, train, str(tmp_path / "found"))
    with pytest.raises(RuntimeError, match="power cut"):
        run(built.stages, tmp_path / "logs")
    run(built.stages, tmp_path / "logs")
    assert json.loads((tmp_path / "found" / "report.json").read_text()) == expected


def test_buffer_sizes_do_not_change_the_report(tmp_path, monkeypatch):
    documents = corpus()
    built, expected = run_search(documents, tmp_path / "whole", (1, 1), action="drop_train")
    remaining = left(built, documents)
    monkeypatch.setattr(runs, "RUN_HASHES", 29)
    for name in ("MAX_PENDING_GRAMS", "MERGE_BLOCK_GRAMS", "SEEN_CACHE_SIZE"):
        monkeypatch.setattr(findings, name, 29)
    built, report = run_search(documents, tmp_path / "pieces", (2, 3), action="drop_train")
    assert report == expected
    assert left(built, documents) == remaining
    for folder in ("grams", "found", "judged"):
        assert len(list((tmp_path / "pieces" / folder / "runs").iterdir())) > 5


def test_table_contains_the_numbers(tmp_path):
    documents = [document(" ".join(TEXT[:20]), "a|b:1", "test", "ArXiv"), document(" ".join(TEXT), "c:9")]
    run_search(documents, tmp_path, action="drop_test")
    text = (tmp_path / "report.md").read_text()
    assert "| test | ArXiv | 1 | 0 | 1 | 8 | 8 (100.00%) | 1 | 1 |" in text
    assert rf"| test | ArXiv | a\|b:1 | 100.00% of 8 | 20 words | {' '.join(TEXT[:13])} | c:9 |" in text
    assert "1 of 1 training documents contain at least one of them" in text
    assert "Contaminated documents are dropped." in text


def test_drop_requires_a_report_with_the_same_options(tmp_path):
    documents = corpus()
    step = DropContaminated(str(tmp_path), str(tmp_path / "judged"), OverlapOptions())
    with pytest.raises(UserError, match=r"report\.json: is missing"):
        read([Given(documents), step], 1)
    run_search(documents, tmp_path)
    assert len(read([Given(documents), step], 1)) == len(documents)
    other = DropContaminated(str(tmp_path), str(tmp_path / "judged"), OverlapOptions(threshold=0.5))
    with pytest.raises(UserError, match=r"was made with threshold 0\.0, not 0\.5"):
        read([Given(documents), other], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram_words": 0}, "^--ngram-words: 0 is not positive"),
        ({"threshold": 1.0}, r"^--contamination-threshold: 1\.0 is not in \[0, 1\)"),
        ({"splits": ("train",)}, "cannot be tested against train"),
        ({"splits": ()}, "cannot be tested against train"),
        ({"action": "drop"}, "action: drop is unknown"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(UserError, match=message):
        OverlapOptions(**options)
