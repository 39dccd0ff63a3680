import random
import string
from pathlib import Path

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from pipelines import FailsOnce, Given, document, read, run, run_here

from data_prep.deduplication import signatures
from data_prep.deduplication.duplicates import NearOptions, exact_duplicates, near_duplicates
from data_prep.deduplication.signatures import ExactSignature, NearSignature
from megatron_ext.utils.errors import UserError

generator = random.Random(5)
VOCABULARY = ["".join(generator.choices(string.ascii_lowercase, k=6)) for _ in range(5000)]


def words(number: int, seed: object) -> list[str]:
    return random.Random(str(seed)).choices(VOCABULARY, k=number)


def changed(original: list[str], share: float, seed: object) -> list[str]:
    """Replace a share of the words by new words."""
    generator = random.Random(f"changed {seed}")
    copy = list(original)
    for place in generator.sample(range(len(copy)), round(share * len(copy))):
        copy[place] = "".join(generator.choices(string.ascii_lowercase, k=9))
    return copy


def jaccard(a: list[str], b: list[str], n: int) -> float:
    first, second = ({tuple(x[i : i + n]) for i in range(len(x) - n + 1)} for x in (a, b))
    return len(first & second) / len(first | second)


def near_ids(documents: list[Document], folder: Path, tasks: int = 1, **options: int) -> set[str]:
    found = near_duplicates([Given(documents)], str(folder), tasks, NearOptions(**options))
    run_here(found.stages)
    return {document.id for document in read(found.documents, tasks)}


@pytest.mark.parametrize(("ngram_words", "buckets", "hashes"), [(5, 14, 8), (3, 20, 5)])
def test_detection_rate_follows_the_similarity(tmp_path, ngram_words, buckets, hashes):
    documents, chances, similarities = [], [], {}
    options = NearOptions(ngram_words=ngram_words, buckets=buckets, hashes_per_bucket=hashes)
    for share in (0.0, 0.01, 0.03, 0.05, 0.08, 0.2):
        for i in range(20):
            original = words(200, (share, i))
            copy = changed(original, share, (share, i))
            similarity = jaccard(original, copy, ngram_words)
            similarities[f"{share}-{i}"] = similarity
            chances.append(1 - (1 - similarity**hashes) ** buckets)
            assert options.detection_probability(similarity) == pytest.approx(chances[-1])
            documents.append(document(" ".join(original), f"{share}-{i}:a", "test"))
            documents.append(document(" ".join(copy), f"{share}-{i}:b", "train"))
    remaining = near_ids(documents, tmp_path, 2, ngram_words=ngram_words, buckets=buckets, hashes_per_bucket=hashes)
    found = {pair for pair in similarities if f"{pair}:b" not in remaining}
    assert {f"{pair}:a" for pair in similarities} <= remaining
    assert {pair for pair, similarity in similarities.items() if similarity > 0.9} <= found
    assert not {pair for pair, similarity in similarities.items() if similarity < 0.2} & found
    spread = sum(chance * (1 - chance) for chance in chances) ** 0.5
    assert abs(len(found) - sum(chances)) < 3 * spread + 1


def test_case_punctuation_and_spaces(tmp_path):
    plain = " ".join(words(60, "plain"))
    fancy = "\n".join(f"{word.capitalize()}," for word in plain.split())
    documents = [document(plain, "a:1"), document(fancy, "a:2"), document(plain, "b:1"), document("short", "b:2")]
    assert len(near_ids(documents, tmp_path / "near")) == 2
    exact = exact_duplicates([Given(documents)], str(tmp_path / "exact"), 2)
    run_here(exact.stages)
    remaining = {document.id for document in read(exact.documents, 2)}
    assert {"a:2", "b:2"} < remaining
    assert len(remaining) == 3


def corpus() -> tuple[list[Document], set[str]]:
    """Return families of equal or nearly equal documents across splits, and the ids that must be kept in any case."""
    documents, stay = [], set()
    for family in range(24):
        text = words(150, family)
        splits = random.Random(family).choices(["train", "validation", "test"], k=4)
        first = min(splits, key=["test", "validation", "train"].index)
        for i, split in enumerate(splits):
            copy = text if family % 2 else changed(text, 0.005, (family, i))
            documents.append(document(" ".join(copy), f"file{family % 5}:{family}-{i}", split))
        if splits.count(first) == 1:
            stay.add(next(d.id for d in documents[-4:] if d.metadata["split"] == first))
    documents += [document(" ".join(words(100, f"alone {i}")), f"alone:{i}") for i in range(10)]
    return documents, stay | {f"alone:{i}" for i in range(10)}


def both(documents: list[Document], folder: Path, tasks: int) -> tuple[set[str], dict]:
    exact = exact_duplicates([Given(documents)], str(folder / "exact"), tasks)
    near = near_duplicates(exact.documents, str(folder / "near"), tasks)
    counts = run_here([*exact.stages, *near.stages])
    return {document.id for document in read(near.documents, tasks)}, counts


def test_survivors_do_not_depend_on_order_and_tasks(tmp_path):
    documents, stay = corpus()
    remaining, counts = both(documents, tmp_path / "one", 1)
    assert stay <= remaining
    assert len(remaining) == 24 + 10
    exact, near = counts["exact_survivors"], counts["near_survivors"]
    assert (exact["removed"], near["removed"]) == (12 * 3, 12 * 3)
    assert sum(near[f"removed_{split}"] for split in ("train", "validation", "test")) == 36
    assert (exact["duplicates"], near["duplicates"]) == (48, 48)
    shuffled = random.Random(1).sample(documents, len(documents))
    assert both(shuffled, tmp_path / "three", 3)[0] == remaining


def test_tasks_without_documents(tmp_path):
    documents = [document(" ".join(words(50, "equal")), name, split) for name, split in (("a", "test"), ("b", "train"))]
    for find in (exact_duplicates, near_duplicates):
        folder = tmp_path / find.__name__
        found = find([Given(documents)], str(folder), 4)
        run_here(found.stages)
        assert [document.id for document in read(found.documents, 4)] == ["a"]


def test_test_documents_linked_by_training_text_are_kept(tmp_path):
    left, right, other = words(200, "left"), words(200, "right"), words(200, "other")
    documents = [
        document(" ".join([*left, *right]), "a:bridge", "train"),
        document(" ".join([*left, *right[:100]]), "a:near left", "test"),
        document(" ".join([*left[100:], *right]), "a:near right", "test"),
        document(" ".join(other), "b:1", "validation"),
        document(" ".join(other), "b:2", "train"),
    ]
    near_left, bridge, near_right = (documents[i].text.split() for i in (1, 0, 2))
    options = NearOptions(buckets=100, hashes_per_bucket=10)
    assert min(options.detection_probability(jaccard(bridge, end, 5)) for end in (near_left, near_right)) > 0.99
    assert options.detection_probability(jaccard(near_left, near_right, 5)) < 0.1
    remaining = near_ids(documents, tmp_path, buckets=100, hashes_per_bucket=10)
    assert remaining == {"a:near left", "a:near right", "b:1"}


def test_interrupted_deduplication_gives_the_same_result(tmp_path):
    documents, _ = corpus()
    remaining, _ = both(documents, tmp_path / "whole", 3)
    source: list[PipelineStep] = [Given(documents), FailsOnce(tmp_path / "mark")]
    exact = exact_duplicates(source, str(tmp_path / "exact"), 3)
    near = near_duplicates(exact.documents, str(tmp_path / "near"), 3)
    with pytest.raises(RuntimeError, match="power cut"):
        run(exact.stages[:1], tmp_path / "logs", workers=2)
    run(exact.stages, tmp_path / "logs")
    run(near.stages[:1], tmp_path / "logs", workers=2)
    run(near.stages[1:], tmp_path / "logs")
    assert {document.id for document in read(near.documents, 3)} == remaining


def test_other_documents_are_rejected(tmp_path):
    documents, _ = corpus()
    found = exact_duplicates([Given(documents)], str(tmp_path), 2)
    with pytest.raises(UserError, match=r"000000\.remove: is missing"):
        read(found.documents, 2)
    run_here(found.stages)
    _, keep = found.documents
    for other, tasks in ((documents[:-1], 2), ([*documents, documents[0]], 2), (documents[::-1], 2), (documents, 3)):
        with pytest.raises(UserError, match="differ from those that were compared"):
            read([Given(other), keep], tasks)


def test_other_number_of_tasks_is_rejected(tmp_path):
    documents, _ = corpus()
    run_here(exact_duplicates([Given(documents)], str(tmp_path), 3).stages)
    with pytest.raises(UserError, match="does not contain exactly the files of 2 tasks"):
        run_here(exact_duplicates([Given(documents)], str(tmp_path), 2).stages[2:])


@pytest.mark.parametrize("block", [7, 512])
def test_signatures_equal_datatrove(tmp_path, monkeypatch, block):
    monkeypatch.setattr(signatures, "BLOCK_SHINGLES", block)
    step = NearSignature(str(tmp_path), MinhashConfig())
    shingles = step.get_shingles(" ".join(words(700, "blocks")))
    assert shingles.shape == (696, 1)
    extremes = np.array([[0], [1], [2**61 - 1], [2**61], [2**64 - 1]], np.uint64)
    for some in (shingles, shingles[:1], extremes, *extremes[:, None]):
        assert step.get_signature(some) == MinhashDedupSignature.get_signature(step, some)


def test_accents_make_no_difference_to_near_duplicates(tmp_path):
    step = NearSignature(str(tmp_path), MinhashConfig())
    plain, accented = (step.get_shingles(text) for text in ("a cafe in the rue, 12", "Ä café in the rue 3,5"))
    assert plain.tolist() == accented.tolist()


def test_exact_signatures_are_in_range(tmp_path):
    """datatrove silently ignores signatures whose first number is 2**61 - 1 or more."""
    step = ExactSignature(str(tmp_path), MinhashConfig(num_buckets=1, hashes_per_bucket=2))
    numbers = [step.get_signature(step.get_shingles(str(i)))[0] for i in range(1000)]
    assert len({tuple(pair) for pair in numbers}) == 1000
    assert np.max(numbers) < 2**60
    assert np.max(numbers) > 2**59


@pytest.mark.parametrize("name", ["ngram_words", "buckets", "hashes_per_bucket"])
def test_options_must_be_positive(name):
    with pytest.raises(UserError, match=f"^--near-{name.replace('_', '-')}: 0 is not positive"):
        NearOptions(**{name: 0})
