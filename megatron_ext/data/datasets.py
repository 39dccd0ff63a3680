"""Loading and validation of a run's data before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_prep.manifest import Manifest, ShardEntry, load_manifest, match_domain
from data_prep.tokenization.vocabularies import check_vocabulary
from megatron_ext.config.layout import Layout
from megatron_ext.config.schema import DataConfig, TrainingConfig
from megatron_ext.data.batches import NO_PACKING, Batch, Packing, micro_batch_indices, training_batch
from megatron_ext.data.cache import ShardCache
from megatron_ext.data.identity import data_record
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import TokenStore
from megatron_ext.data.verified import Stamp, Verified
from megatron_ext.data.verify import THREADS, Check, Damage, check_here, check_tokenizer, find_damage, verify_shards
from megatron_ext.data.weights import domain_weights
from megatron_ext.parallel.agreement import gather_objects, raise_on_all_ranks
from megatron_ext.platform.device import local_rank
from megatron_ext.utils.atomic_files import is_url
from megatron_ext.utils.errors import UserError


@dataclass(frozen=True)
class RunData:
    """Prepared data after validation.

    Attributes:
        root: folder of the manifest; the cache folder if the data is remote.
        manifest: manifest of the data.
        tokenizer_file: tokenizer that produced the tokens.
        train_domains: domains to train on.
        test_domains: domains to test on. A test domain is in-domain if it is also in `train_domains`, else
            out-of-domain.
        samples: training samples in the run's order.
        weights: sampling weights of the training domains, if configured.
        damages: damaged training shards, which no sample reads.
        verified: files whose sha256 was compared, on all ranks; see `Verified`.
        unchanged: number of verified files that were not read again, because an earlier start of the run verified them
            and they have not changed since.
        warnings: lines to print.
        record: identification of the training and evaluation text; see `data_record`.
    """

    root: Path
    manifest: Manifest
    tokenizer_file: Path
    train_domains: list[str]
    test_domains: list[str]
    samples: TrainingSamples
    weights: dict[str, float] | None = None
    damages: Sequence[Damage] = ()
    verified: Mapping[str, Stamp] = field(default_factory=dict)
    unchanged: int = 0
    warnings: Sequence[str] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.manifest.tokenizer.vocab_size


def open_data(
    data: DataConfig, seed: int, known: Mapping[str, Stamp] | None = None, failed: Iterable[str] = ()
) -> RunData:
    """Check the manifest, tokenizer and shards, and open the training samples; a collective call.

    The ranks divide the shards among themselves. An error on one rank is raised on all ranks.

    Args:
        data: data section of the configuration.
        seed: seed of the sample order.
        known: files that an earlier start of the run has verified; see `Verified`.
        failed: shards that an earlier start failed to read. Every machine verifies them in full, even if they are in
            `known`.

    Raises:
        UserError: a file or domain is missing, a file is damaged, or the data belongs to another tokenizer.
    """
    root, manifest, cache = _opened(data)
    tokenizer_file = check_tokenizer(root, manifest, Path(data.tokenizer) if data.tokenizer else None)
    first_rank = partial(check_vocabulary, tokenizer_file, manifest.tokenizer) if dist.get_rank() == 0 else partial(int)
    raise_on_all_ranks(first_rank)
    train, test = chosen_domains(data, manifest)
    weights = None if data.weights is None else domain_weights(data.weights, train, manifest)
    doubted = frozenset(chain.from_iterable(gather_objects(sorted(failed))))
    verified = Verified(root, {} if data.verify == "sha256_always" else known or {}, doubted)
    splits = {"train": train, "validation": train, "test": test}
    damages = _verified(verified, manifest, splits, data, cache, doubted)
    small = None if cache is None else cache.is_small_for(_read(manifest, train, damages))
    # An open file keeps its disk space after the cache has evicted it. If the training shards exceed the cache's limit,
    # only one shard may therefore be open at a time.
    most_open = None if small is None else 1
    store = TokenStore(root, manifest, "train", train, None if cache is None else cache.holding, most_open)
    samples = TrainingSamples(store, data.seq_length, seed, weights, [damage.shard for damage in damages])
    gathered = gather_objects((verified.found, verified.unchanged))
    found = {path: stamp for stamps, _ in gathered for path, stamp in stamps.items()}
    unchanged = sum(count for _, count in gathered)
    warnings = [] if small is None else [f"selectron: warning: {small}"]
    record = data_record(manifest, train, test, seq_length=data.seq_length, seed=seed, weights=weights)
    return RunData(
        root, manifest, tokenizer_file, train, test, samples, weights, damages, found, unchanged, warnings, record
    )


def open_tests(data: DataConfig) -> tuple[Path, Manifest, list[str], list[str]]:
    """Check the manifest and the evaluation text, but not the training text; a collective call.

    Returns:
        Folder of the manifest (see `RunData.root`), manifest, training domains and test domains (see `chosen_domains`).

    Raises:
        UserError: see `open_data`.
    """
    root, manifest, cache = _opened(data)
    train, test = chosen_domains(data, manifest)
    _verified(Verified(root, {}), manifest, {"validation": train, "test": test}, data, cache, frozenset())
    return root, manifest, train, test


def chosen_domains(data: DataConfig, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Return the domains to train on and to test on, by their names in the manifest.

    By default all domains with test text are tested, except those that have training text but are not trained on.

    Raises:
        UserError: a named domain or a split does not exist.
    """
    train = _chosen(manifest, "train", data.train_domains)
    idle = set(manifest.domain_names("train")).difference(train)
    usual = [name for name in manifest.domain_names("test") if name not in idle]
    return train, _chosen(manifest, "test", usual if data.test_domains is None else data.test_domains)


def _opened(data: DataConfig) -> tuple[Path, Manifest, ShardCache | None]:
    """Return the manifest's folder, the manifest, and the cache of remote data (None for local data)."""
    cache = ShardCache(data.path, Path(data.cache_dir or ""), data.cache_gib) if is_url(data.path) else None
    root = Path(data.path) if cache is None else cache.root
    return root, load_manifest(root), cache


def _verified(
    verified: Verified,
    manifest: Manifest,
    domains: dict[str, list[str]],
    data: DataConfig,
    cache: ShardCache | None,
    doubted: frozenset[str],
) -> list[Damage]:
    """Check the shards and return the damaged training shards to skip, the same on every rank.

    Raises:
        UserError: a shard is damaged that may not be skipped.
    """
    damages: list[Damage] = []
    for split, names in domains.items():
        present = [domain for domain in names if domain in manifest.domain_names(split)]
        if not present:
            continue
        looks = _looks(verified, split, data, cache, doubted)
        for look in looks:
            if split == "train" and data.on_damaged == "skip":
                damages += _of_every_rank(partial(find_damage, verified.root, manifest, split, present, **look))
            else:
                raise_on_all_ranks(partial(verify_shards, verified.root, manifest, [split], present, **look))
    return sorted(damages, key=lambda damage: damage.shard)


def _looks(
    verified: Verified, split: str, data: DataConfig, cache: ShardCache | None, doubted: frozenset[str]
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call of a shard check: the check, its threads, and this rank's share.

    The ranks divide the shards. For remote data, only the existence and size of training shards are checked, at their
    URL. Evaluation shards are downloaded to every machine. A shard that an earlier start failed to read is verified in
    full by one rank of each machine, because each machine may have its own copy.
    """
    shared: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    usual: Check = verified.check
    whole: Check = verified.check
    threads = THREADS
    if cache is not None:
        whole = cache.renew
        if split == "train":
            usual, threads = cache.check, 1  # threads would not help: one request lists the sizes of many shards
        else:
            usual, shared = cache.keep, {}
    elif data.verify == "size":
        usual, whole = partial(check_here, verified.root, "size"), partial(check_here, verified.root, "sha256")
    if not doubted:
        return [{"check": usual, "threads": threads, **shared}]
    others: dict[str, Any] = {"check": _where(lambda shard: shard not in doubted, usual), "threads": threads, **shared}
    return [others, {"check": _where(lambda shard: shard in doubted and local_rank() == 0, whole)}]


def _where(wanted: Callable[[str], bool], check: Check) -> Check:
    """Restrict a check to the shards whose tar file name in the manifest satisfies `wanted`."""

    def check_some(shard: ShardEntry) -> None:
        if wanted(shard.file):
            check(shard)

    return check_some


def _of_every_rank(find: Callable[[], list[Damage]]) -> list[Damage]:
    """Merge the damages found by all ranks, without repeating a shard; a collective call."""
    found: list[Damage] = []
    raise_on_all_ranks(lambda: found.extend(find()))
    gathered = chain.from_iterable(gather_objects([asdict(damage) for damage in found]))
    return list({fields["shard"]: Damage(**fields) for fields in gathered}.values())


def _read(manifest: Manifest, domains: list[str], damages: Sequence[Damage]) -> list[ShardEntry]:
    """Return the training shards that are not damaged, from which samples are read."""
    lost = {damage.shard for damage in damages}
    return [shard for entry in manifest.select("train", domains) for shard in entry.shards if shard.file not in lost]


def _chosen(manifest: Manifest, split: str, asked: list[str] | None) -> list[str]:
    """Return the manifest's names of the domains in `asked`, or of all domains of the split if `asked` is None."""
    present = manifest.domain_names(split)
    for name in (asked or []) if present else []:
        if match_domain(name, present) is None:
            problem = f"no domain {name} in the {split} split of the data"
            raise UserError(f"data.{split}_domains", problem, f"choose from: {', '.join(present)}")
    return sorted({entry.domain for entry in manifest.select(split, asked)})


def packing_of(data: DataConfig) -> Packing:
    """Return the document information that the run's batches contain."""
    apart = data.reset_attention
    return Packing(data.document_boundaries or apart, data.reset_positions or apart, apart)


def step_batches(
    samples: TrainingSamples,
    first_sample: int,
    training: TrainingConfig,
    layout: Layout,
    *,
    dp_rank: int,
    cp_rank: int,
    cp_size: int,
    packing: Packing = NO_PACKING,
) -> list[Batch]:
    """Return this rank's micro-batches of the step that begins at `first_sample`."""
    return [
        training_batch(
            samples,
            micro_batch_indices(
                first_sample, micro_batch, training.micro_batch_size, dp_rank, layout.data_parallel_size
            ),
            cp_rank,
            cp_size,
            packing,
        )
        for micro_batch in range(layout.num_micro_batches)
    ]
