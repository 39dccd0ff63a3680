"""The complete pipeline of `selectron prepare`: domains, cleaning, duplicates, decontamination, splits."""

import json
import random
import string
from pathlib import Path

import pytest
import webdataset
from prep_fakes import options, record, write_jsonl
from tokenizers import Tokenizer

from data_prep import prepare as module
from data_prep.contamination.overlap import OverlapOptions
from data_prep.domains import resolve_domains
from data_prep.manifest import Manifest
from data_prep.prepare import PrepareOptions, prepare
from data_prep.stages import Filtering
from data_prep.steps import ReadCorpus
from data_prep.summary import format_summary
from megatron_ext.utils.errors import UserError

generator = random.Random(11)
VOCABULARY = ["".join(generator.choices(string.ascii_lowercase, k=5)) for _ in range(2000)]


def prose(seed: str, words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=words))


LEAKED, COPIED, NEAR, SHORT = prose("leaked"), prose("copied"), prose("near", 200), prose("short", 12)
WITH_LEAK = f"{prose('before')} {' '.join(LEAKED.split()[20:40])} {prose('after')}"
NEARLY = f"{NEAR} indeed"
PLAIN = [prose(f"plain {i}") for i in range(20)]
TRAIN = [WITH_LEAK, COPIED, NEARLY, *PLAIN, PLAIN[3]]
TEST = [LEAKED, COPIED, NEAR, SHORT]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Three files. Copies lie in different files, and training copies precede the test documents."""
    content = [record("C4", text) for text in TRAIN]
    content += [record("C4", "one\r\ntwo\0 three\x07 e\u0301"), record("C4", "\0\0"), record("Law", "\0 unused")]
    content += [record("ArXiv", text) for text in TEST]
    for number in range(3):
        write_jsonl(tmp_path / "raw" / f"{number}.jsonl", content[number * 11 : number * 11 + 11])
    assert len(content) <= 33
    return tmp_path / "raw"


def prepared(raw: Path, out: Path, tokenizer: Path, filtering: Filtering, **changes: object) -> Manifest:
    fields = {"train_domains": ["C4"], "test_domains": ["ArXiv"], "validation_fraction": 0.0, "filtering": filtering}
    manifest = prepare(options(raw, out, tokenizer, **{**fields, **changes}))
    assert manifest is not None
    return manifest


def texts(root: Path, tokenizer: Path, split: str) -> list[str]:
    decoder = Tokenizer.from_file(str(tokenizer))
    files = sorted(map(str, root.glob(f"{split}/*/*.tar")))
    samples = [item for file in files for item in webdataset.WebDataset(file, shardshuffle=False).decode()]
    return sorted(decoder.decode(item["tokens.npy"][:-1].tolist()) for item in samples)


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def left_out(manifest: Manifest) -> dict[tuple[str, str], int]:
    return {(entry.split, entry.reason): entry.documents for entry in manifest.left_out}


def near(action: str = "report", threshold: float = 0.0) -> Filtering:
    return Filtering(duplicates="near", overlap=OverlapOptions(action=action, threshold=threshold))


CLEANED = "one\ntwo three \u00e9"


def test_filters_and_their_counts(raw, tmp_path, tokenizer_file):
    manifest = prepared(raw, tmp_path / "out", tokenizer_file, near(), tasks=2)
    assert texts(tmp_path / "out", tokenizer_file, "train") == sorted([WITH_LEAK, *PLAIN, CLEANED])
    assert texts(tmp_path / "out", tokenizer_file, "test") == sorted(TEST)
    expected = {("train", "empty"): 1, ("train", "exact duplicate"): 2, ("train", "near duplicate"): 1}
    assert left_out(manifest) == expected
    assert manifest.duplicates == 3
    # The document of NUL alone counts as changed, too, before it is left out.
    assert [(entry.split, entry.reason, entry.documents) for entry in manifest.cleaned] == [
        *(("train", "controls", 1), ("train", "line_ends", 1), ("train", "nul", 2), ("train", "unicode", 1))
    ]
    assert manifest.options["duplicates"] == "near"
    assert (manifest.options["clean"], manifest.options["decontaminate"]) == (True, "report")

    report = json.loads((tmp_path / "out/contamination.json").read_bytes())
    (entry,) = report["domains"]
    found = {name: entry[name] for name in ("documents", "short", "contaminated", "ngrams_in_train")}
    assert found == {"documents": 4, "short": 1, "contaminated": 1, "ngrams_in_train": 20 - 13 + 1}
    printed = format_summary(manifest, str(tmp_path / "out")).splitlines()
    assert {
        "contamination: test ArXiv: 4 documents tested, 1 contaminated, 1 too short to judge",
        "cleaned: 2 in train: NUL characters removed",
        "dropped: 2 in train: exact duplicates",
        f"contamination: see {tmp_path / 'out/contamination.md'}",
    } <= set(printed)
    assert "| test | ArXiv | 4 | 1 | 1 |" in (tmp_path / "out/contamination.md").read_text()


def test_contaminated_documents_are_dropped_from_the_chosen_split(raw, tmp_path, tokenizer_file):
    manifest = prepared(raw, tmp_path / "test", tokenizer_file, near("drop_test"))
    assert texts(tmp_path / "test", tokenizer_file, "test") == sorted([COPIED, NEAR, SHORT])
    assert WITH_LEAK in texts(tmp_path / "test", tokenizer_file, "train")
    assert left_out(manifest)["test", "contaminated"] == 1
    assert "4 documents tested, 1 contaminated, 1 dropped, 1 too" in format_summary(manifest, str(tmp_path / "test"))

    manifest = prepared(raw, tmp_path / "train", tokenizer_file, near("drop_train"))
    assert texts(tmp_path / "train", tokenizer_file, "test") == sorted(TEST)
    assert WITH_LEAK not in texts(tmp_path / "train", tokenizer_file, "train")
    assert left_out(manifest)["train", "contaminated"] == 1

    manifest = prepared(raw, tmp_path / "more", tokenizer_file, near("drop_train", threshold=0.5))
    assert ("train", "contaminated") not in left_out(manifest)  # 8 of 48 n-grams


def test_no_filters_take_one_pass(raw, tmp_path, tokenizer_file, monkeypatch):
    names = []
    run = module.run_stages
    monkeypatch.setattr(
        module,
        "run_stages",
        lambda stages, *rest, **more: (names.extend(s.name for s in stages), run(stages, *rest, **more)),
    )
    bare = Filtering(cleaning=None, duplicates="keep", overlap=None)
    manifest = prepared(raw, tmp_path / "out", tokenizer_file, bare)
    assert names == ["tokenising"]
    assert texts(tmp_path / "out", tokenizer_file, "train") == sorted(
        [*TRAIN, "one\r\ntwo\0 three\x07 e\u0301", "\0\0"]
    )
    assert (manifest.left_out, manifest.cleaned, manifest.duplicates) == ([], [], 0)
    assert not (tmp_path / "out/contamination.json").exists()

    names.clear()
    prepared(raw, tmp_path / "usual", tokenizer_file, Filtering())
    assert sum(name in ("exact_signatures", "search_train", "judge_test", "tokenising") for name in names) == 4
    assert "collect_test_ngrams" not in names  # it shares the pass of the signatures
    names.clear()
    prepared(raw, tmp_path / "kept", tokenizer_file, Filtering(duplicates="keep"))
    assert names[0] == "collect_test_ngrams"
    reports = [json.loads((tmp_path / name / "contamination.json").read_bytes()) for name in ("usual", "kept")]
    assert [report["domains"][0]["contaminated"] for report in reports] == [2, 3]  # COPIED too, if its copy is kept


def test_output_is_independent_of_interruptions_and_workers(raw, tmp_path, tokenizer_file, monkeypatch):
    filtering = near("drop_train")
    prepared(raw, tmp_path / "whole", tokenizer_file, filtering, tasks=3, workers=2)
    read = ReadCorpus.run
    calls, left = 0, [0]

    def counting(*arguments: object):
        for document in read(*arguments):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            yield document

    with monkeypatch.context() as patch:
        patch.setattr(ReadCorpus, "run", counting)
        while not (tmp_path / "out").exists():
            left[0], calls = 40, calls + 1
            try:
                prepared(raw, tmp_path / "out", tokenizer_file, filtering, tasks=3)
            except KeyboardInterrupt:
                assert calls < 10
    assert calls > 3  # each call completes three or four of fifteen tasks in five passes
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")

    prepared(raw, tmp_path / "one", tokenizer_file, filtering, tasks=1)
    for split in ("train", "test"):
        assert texts(tmp_path / "one", tokenizer_file, split) == texts(tmp_path / "out", tokenizer_file, split)
    reports = [(tmp_path / name / "contamination.json").read_bytes() for name in ("one", "out")]
    assert reports[0] == reports[1]


def test_a_tokenizer_is_trained_on_cleaned_text(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", [record("C4", f"{text}\r\n\x07{i}") for i, text in enumerate(PLAIN)])
    changes = {"train_domains": ["C4"], "test_domains": [], "vocab_size": 300}
    clean = prepare(options(source, tmp_path / "clean", "train", **changes))
    write_jsonl(source, [record("C4", f"{text}\n{i}") for i, text in enumerate(PLAIN)])
    given = prepare(options(source, tmp_path / "given", "train", **changes))
    assert clean.tokenizer.sha256 == given.tokenizer.sha256


def test_default_domains(tmp_path, tokenizer_file):
    domains = ("C4", "Github", "Book", "Law")
    for folder in ("train", "test"):
        content = [record(domain, prose(f"{folder} {domain} {i}")) for domain in domains for i in range(5)]
        write_jsonl(tmp_path / "raw" / folder / "x.jsonl", content)
    manifest = prepare(PrepareOptions(
        input=str(tmp_path / "raw"), output=str(tmp_path / "out"), tokenizer=str(tokenizer_file), progress=False,
        validation_fraction=0.0,
    ))  # fmt: skip
    assert [(entry.split, entry.domain) for entry in manifest.domains] == [
        *(("train", "C4"), ("test", "Book"), ("test", "C4"), ("test", "Github"))
    ]
    assert all(entry.documents == 5 for entry in manifest.domains)
    assert "no documents in: CommonCrawl, ArXiv, StackExchange, Wikipedia" in format_summary(manifest, "")


@pytest.mark.parametrize(
    ("named", "train", "test"),
    [
        ({}, ["CommonCrawl", "C4"], ["ArXiv", "Github", "StackExchange", "Wikipedia", "Book"]),
        ({"train_domains": ["RedPajamaBook"]}, ["RedPajamaBook"], ["ArXiv", "Github", "StackExchange", "Wikipedia"]),
        ({"test_domains": ["c4"]}, ["CommonCrawl"], ["c4"]),
        ({"test_domains": []}, ["CommonCrawl", "C4"], []),
    ],
)
def test_defaults_exclude_the_requested_domains(named, train, test):
    assert resolve_domains(named.get("train_domains"), named.get("test_domains")) == (train, test)


def test_input_without_default_domains(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "raw/x.jsonl", [record("Law", prose("a")), record("Book", prose("b"))])
    with pytest.raises(UserError) as caught:
        prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, train_domains=None))
    assert str(caught.value) == (
        "--train-domains: is not given, and the input has none of the default domains CommonCrawl, C4; "
        "choose from the domains of the input: Book, Law"
    )


def test_nothing_to_decontaminate(tmp_path, tokenizer_file):
    source = write_jsonl(tmp_path / "x.jsonl", [record("C4", text) for text in PLAIN])
    for_nothing = {"train_domains": ["C4"], "test_domains": []}
    with pytest.raises(UserError, match=r"^--decontaminate: there are no test documents; "):
        prepare(options(source, tmp_path / "out", tokenizer_file, filtering=near("drop_test"), **for_nothing))
    prepare(options(source, tmp_path / "out", tokenizer_file, **for_nothing))
    assert not (tmp_path / "out/contamination.json").exists()
