"""Cache of prepared data at a URL: copies, locks, rejections and eviction."""

import io
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from data_prep.manifest import Manifest, ShardEntry
from megatron_ext.data.cache import BLOCK_BYTES, ShardCache
from megatron_ext.data.failed import DamagedShard
from megatron_ext.data.shards import TokenStore
from megatron_ext.data.verify import find_damage
from megatron_ext.utils.atomic_files import is_url
from megatron_ext.utils.errors import UserError


@pytest.fixture
def remote(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "remote"))


@pytest.fixture
def cache(remote, tmp_path) -> ShardCache:
    return ShardCache(f"file://{remote}", tmp_path / "cache")


def train_shards(manifest: Manifest) -> list[ShardEntry]:
    return [shard for entry in manifest.select("train") for shard in entry.shards]


def copies(cache: ShardCache) -> set[str]:
    found = {path.relative_to(cache.root).as_posix() for path in cache.root.rglob("*.tar")}
    return {name for name in found if not name.startswith(".locks/")}


def test_shards_are_copied_on_first_read(cache, prepared, manifest, documents):
    assert cache.manifest == manifest
    assert (cache.root / "tokenizer.json").read_bytes() == (prepared / "tokenizer.json").read_bytes()
    store = TokenStore(cache.root, cache.manifest, "train", pin_shard=cache.pin_shard)
    stream = np.concatenate(documents["train"])
    first, *others = train_shards(manifest)
    assert copies(cache) == set()
    assert np.array_equal(store.read(3, 20), stream[3:23])
    assert copies(cache) == {first.file}
    assert np.array_equal(store.read(0, store.num_tokens), stream)
    assert copies(cache) == {shard.file for shard in (first, *others)}
    assert cache.num_copied == 1 + 2 * (1 + len(others))  # the tokenizer, and each tar and index once
    assert not list(cache.root.rglob("*.partial"))


@pytest.fixture
def memory(prepared) -> Iterator[Any]:
    """In-memory file system with the prepared data in /prepared."""
    files = fsspec.filesystem("memory")
    files.put(str(prepared), "/prepared", recursive=True)
    yield files
    files.rm("/prepared", recursive=True)


def test_in_memory_file_system(memory, prepared, manifest, tmp_path):
    cache = ShardCache("memory://prepared", tmp_path / "cache")
    shard = train_shards(manifest)[0]
    cache.check(shard)
    with cache.pin_shard(shard):
        assert (cache.root / shard.file).read_bytes() == (prepared / shard.file).read_bytes()


def requests(memory: Any, shards: list[ShardEntry], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of file system requests made while shards are checked."""
    cache, calls = ShardCache("memory://prepared", folder), []
    with monkeypatch.context() as patch:
        for name in ("find", "ls", "info", "open"):
            method = getattr(memory, name)

            def record_call(*arguments: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
                calls.append(_name)
                return _method(*arguments, **options)

            patch.setattr(memory, name, record_call)
        for shard in shards:
            cache.check(shard)
    return len(calls)


def test_number_of_requests_is_constant(memory, manifest, tmp_path, monkeypatch):
    shards = manifest.select("train", ["CommonCrawl"])[0].shards
    assert len(shards) > 2
    few, all_of_them = (requests(memory, shards[:count], tmp_path, monkeypatch) for count in (1, None))
    assert few == all_of_them < 4


@pytest.mark.parametrize("listed", [NotImplementedError, {}, {"size": None}])
def test_file_system_without_listing(cache, remote, manifest, monkeypatch, listed):
    def find(folder: str, detail: bool) -> Any:
        if isinstance(listed, dict):
            return {path: listed for path in (f"{remote}/{shard.file}" for shard in train_shards(manifest))}
        raise listed

    monkeypatch.setattr(cache._file_system, "find", find)
    whole, missing = train_shards(manifest)[:2]
    (remote / missing.file).unlink()
    cache.check(whole)
    with pytest.raises(UserError, match=rf"{missing.file}: is missing; "):
        cache.check(missing)


def take(url: str, folder: Path, start: object, found: object) -> None:
    cache = ShardCache(url, folder)
    start.wait()
    for shard in train_shards(cache.manifest)[:3]:
        with cache.pin_shard(shard):
            pass
    found.put(cache.num_copied)


def test_two_processes_copy_a_shard_once(remote, cache, tmp_path):
    context = multiprocessing.get_context("spawn")
    start, found = context.Barrier(2), context.Queue()
    arguments = (f"file://{remote}", tmp_path / "cache", start, found)
    processes = [context.Process(target=take, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    assert sum(found.get(timeout=240) for _ in processes) == 2 * 3
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_cached_shards_are_not_copied_again(cache, remote, tmp_path, manifest):
    shard = train_shards(manifest)[0]
    cache.fetch(shard)
    again = ShardCache(f"file://{remote}", tmp_path / "cache")
    again.fetch(shard)
    assert again.num_copied == 0
    (again.root / shard.file).write_bytes(b"cut short")
    again.fetch(shard)
    assert again.num_copied == 1


def test_remote_damage_is_named_and_not_cached(cache, remote, manifest):
    whole, flipped, truncated, missing = train_shards(manifest)[:4]
    content = bytearray((remote / flipped.file).read_bytes())
    content[700] ^= 1
    (remote / flipped.file).write_bytes(content)
    os.truncate(remote / truncated.index, 100)
    (remote / missing.file).unlink()
    found = find_damage(cache.root, manifest, "train", ["C4", "CommonCrawl"], check=cache.check)
    assert {damage.shard for damage in found} == {truncated.file, missing.file}  # hashes are compared at download
    for shard, message in (
        (flipped, rf"remote/{flipped.file}: sha256 differs: expected [0-9a-f]+, found [0-9a-f]+; copy it there again"),
        (truncated, rf"remote/{truncated.index}: sha256 differs"),
        (missing, rf"remote/{missing.file}: cannot be read \(No such file or directory\); copy it there again"),
    ):
        with pytest.raises(UserError, match=message), cache.pin_shard(shard):
            pass
        assert not (cache.root / shard.file).exists()
    with pytest.raises(DamagedShard) as caught:  # the run records the shard, and the next start verifies it in full
        cache.fetch(flipped)
    assert caught.value.shard == flipped.file
    assert {
        one.shard for one in find_damage(cache.root, manifest, "train", ["C4", "CommonCrawl"], check=cache.refetch)
    } == {flipped.file, truncated.file, missing.file}
    cache.fetch(whole)
    assert not list(cache.root.rglob("*.partial"))


def test_network_error_is_not_damage(cache, manifest, monkeypatch):
    def fails(_: str, **options: object) -> int:
        raise TimeoutError

    monkeypatch.setattr(cache._file_system, "size", fails)
    monkeypatch.setattr(cache._file_system, "find", fails)
    with pytest.raises(UserError, match=r"train/C4/000000\.index\.npy: cannot be read \(TimeoutError\); "):
        find_damage(cache.root, manifest, "train", ["C4"], check=cache.check)


def test_least_recently_opened_shard_is_evicted_first(remote, tmp_path, manifest):
    shards = train_shards(manifest)[:5]
    max_bytes = 100 + sum(shards[number].bytes + shards[number].index_bytes for number in (0, 3, 4))
    cache = ShardCache(f"file://{remote}", tmp_path / "cache", max_gib=max_bytes / 2**30)
    evaluation_shard = manifest.select("test")[0].shards[0]
    cache.fetch(evaluation_shard)
    for number, shard in enumerate((shards[0], shards[1], shards[2], shards[0], shards[3])):
        cache.fetch(shard)
        os.utime(cache.root / shard.file, ns=(number, number))
    cache.fetch(shards[4])
    assert copies(cache) == {evaluation_shard.file} | {shards[number].file for number in (0, 3, 4)}
    assert {path.name for path in cache.root.rglob("*.npy")} == {
        Path(shard.index).name for shard in (evaluation_shard, shards[0], shards[3], shards[4])
    }
    tiny = ShardCache(f"file://{remote}", tmp_path / "cache", max_gib=2**-30)
    with cache.pin_shard(shards[0]):
        tiny.fetch(shards[1])  # the shard being opened and the newly copied one are never evicted
        assert copies(cache) == {evaluation_shard.file, shards[0].file, shards[1].file}


def test_changed_manifest_gets_its_own_cache_folder(cache, remote, tmp_path):
    manifest = remote / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"duplicates": 0', '"duplicates": 1'))
    assert ShardCache(f"file://{remote}", tmp_path / "cache").root != cache.root


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "file:" + "//" + "/nowhere",
            "file:" + "//" + "/nowhere/manifest.json: cannot be read (No such file or directory); ",
        ),
        ("nosuch://bucket", "data.path: nosuch://bucket cannot be read (Protocol not known: nosuch)"),
    ],
)
def test_invalid_urls(tmp_path, url, message):
    with pytest.raises(UserError) as caught:
        ShardCache(url, tmp_path)
    assert str(caught.value).startswith(message)


def test_full_disk_is_not_damage(cache, manifest, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_ext.data.cache.fsync_path", full)
    with pytest.raises(UserError, match=r"^data.cache_dir: .* cannot be written \(No space left on device\); "):
        cache.fetch(train_shards(manifest)[0])
    with pytest.raises(UserError, match=r"^data.cache_dir: "):
        find_damage(cache.root, manifest, "train", ["C4"], check=cache.refetch)
    assert copies(cache) == set()


def test_refetch_replaces_a_damaged_copy(cache, remote, prepared, manifest):
    shard = train_shards(manifest)[0]
    cache.fetch(shard)
    copy = cache.root / shard.file
    copy.write_bytes(bytes(shard.bytes))  # the right size, so `fetch` alone would not replace it
    cache.fetch(shard)
    assert copy.read_bytes() == bytes(shard.bytes)
    cache.refetch(shard)
    assert copy.read_bytes() == (prepared / shard.file).read_bytes()
    (remote / shard.file).write_bytes(bytes(shard.bytes))
    with pytest.raises(DamagedShard, match="sha256 differs"):
        cache.refetch(shard)
    assert copy.read_bytes() == (prepared / shard.file).read_bytes()


def test_warning_about_a_small_cache(remote, tmp_path, manifest):
    shards = train_shards(manifest)
    size = sum(shard.bytes + shard.index_bytes for shard in shards)
    for max_gib in (None, size / 2**30):
        assert ShardCache(f"file://{remote}", tmp_path / "cache", max_gib=max_gib).size_warning(shards) is None
    message = ShardCache(f"file://{remote}", tmp_path / "cache", max_gib=size / 4 / 2**30).size_warning(shards)
    assert message == (
        f"data.cache_gib: {size / 4 / 2**30:.3g} GiB, but the training shards take {size / 2**30:.3g} GiB: about "
        "75 % of the samples wait until a whole shard is copied again; increase it, or remove the limit"
    )


def test_is_url():
    assert is_url("s3://bucket/data")
    assert not is_url("data/prepared")


HOSTILE = "../../../home/.ssh/authorized_keys"


@pytest.mark.parametrize("field", ["tokenizer", "file", "index"])
def test_manifest_paths_outside_the_cache(remote, tmp_path, field):
    """Nothing is downloaded or written, even though the files exist and their hashes match."""
    manifest = json.loads((remote / "manifest.json").read_bytes())
    entry = manifest["tokenizer"] if field == "tokenizer" else manifest["domains"][0]["shards"][0]
    entry["file" if field == "tokenizer" else field] = HOSTILE
    (remote / "manifest.json").write_text(json.dumps(manifest))
    folder = tmp_path / "deep" / "er" / "cache"
    with pytest.raises(UserError, match=r"manifest\.json \(.*\): names '\.\./.*which leads out of its folder; "):
        ShardCache(f"file://{remote}", folder)
    assert not (tmp_path / "deep").exists()


def test_link_out_of_the_cache_is_neither_followed_nor_removed(cache, manifest, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    shard = train_shards(manifest)[0]
    first = Path(shard.file).parts[0]
    (cache.root / first).symlink_to(outside)
    with pytest.raises(UserError, match="where a link leads out of"), cache.pin_shard(shard):
        pass
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("evict", None),
        ("\u00e9" * 60 + "/" + "\u00e9" * 60, None),
        ("a" * 250, "(File name too long)"),
    ],
    ids=["evict", "quoted", "long"],
)
def test_shard_names_do_not_collide_with_cache_files(memory, tmp_path, name, message):
    """Reject shard names that collide with the cache's own files.

    A lock file with the name of a shard would deadlock its holder. Quoting can make names too long.
    """
    content = json.loads(memory.cat("/prepared/manifest.json"))
    shard = next(one for one in content["domains"] if one["split"] == "train")["shards"][0]
    memory.pipe(f"/prepared/{name}", memory.cat(f"/prepared/{shard['file']}"))
    shard["file"] = name
    memory.pipe("/prepared/manifest.json", json.dumps(content).encode())
    cache = ShardCache("memory://prepared", tmp_path / "cache", 1e-9)  # a size limit near zero: evicts after each copy
    first = next(one for one in train_shards(cache.manifest) if one.file == name)
    taken: list[str | None] = []

    def take() -> None:
        try:
            with cache.pin_shard(first):
                taken.append(None)
        except UserError as error:
            taken.append(error.problem)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(120)
    assert [problem and problem[problem.index("(") :] for problem in taken] == [message]


def test_endless_remote_file(memory, tmp_path, monkeypatch):
    """A download stops after the number of bytes in the manifest, instead of filling the disk."""
    cache = ShardCache("memory://prepared", tmp_path / "cache")
    shard = train_shards(cache.manifest)[0]
    calls = []

    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            calls.append(size)
            return bytes(size)

    monkeypatch.setattr(cache._file_system, "open", lambda *_: Endless())
    with pytest.raises(DamagedShard, match=rf"has more than {shard.index_bytes} bytes"), cache.pin_shard(shard):
        pass
    assert calls == [BLOCK_BYTES]
    assert copies(cache) == set()
    assert not list(cache.root.rglob("*.partial"))


def test_oversized_manifest(remote, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ext.data.cache.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(UserError, match=r"manifest\.json: has more than 0 MiB, which is too large"):
        ShardCache(f"file://{remote}", tmp_path / "cache")


def test_credentials_are_not_shown(memory, prepared, tmp_path):
    """Credentials do not change the name of the cache folder either, because keys are rotated."""
    addresses = [f"memory://K:{key}@prepared" for key in ("hunter2", "hunter3")]
    for address in addresses:  # this file system treats credentials as part of the path
        memory.put(str(prepared), address.removeprefix("memory:/"), recursive=True)
    folders = [ShardCache(address, tmp_path / "cache").root for address in addresses]
    assert folders[0] == folders[1]
    assert not [path for path in folders[0].rglob("*") if path.is_file() and b"hunter" in path.read_bytes()]
    with pytest.raises(UserError, match=r"^memory://\*\*\*@nothing/manifest\.json: cannot be read") as caught:
        ShardCache("memory://K:hunter2@nothing", tmp_path / "cache")
    assert "hunter" not in str(caught.value)
    with pytest.raises(UserError, match=r"memory://\*\*\*@prepared was saved without its credentials"):
        ShardCache("memory://***@prepared", tmp_path / "cache")
