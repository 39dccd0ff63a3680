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
from megatron_ext.data.verified import FileStamp, ShardVerifier
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
        verified: files of all ranks whose sha256 was compared at this start or an earlier one; see `ShardVerifier`.
        num_unchanged: number of these files that were not read again, because they have not changed since an earlier
            start of the run verified them.
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
    verified: Mapping[str, FileStamp] = field(default_factory=dict)
    num_unchanged: int = 0
    warnings: Sequence[str] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.manifest.tokenizer.vocab_size


def open_data(
    data: DataConfig, seed: int, known: Mapping[str, FileStamp] | None = None, failed: Iterable[str] = ()
) -> RunData:
    """Check the manifest, tokenizer and shards, and open the training samples; a collective call.

    The ranks divide the shards among themselves. An error on one rank is raised on all ranks.

    Args:
        data: data section of the configuration.
        seed: seed of the sample order.
        known: files that an earlier start of the run has verified; see `ShardVerifier`.
        failed: shards that an earlier start failed to read. Every machine verifies them in full, even if they are in
            `known`.

    Raises:
        UserError: a file or domain is missing, a file is damaged, or the data belongs to another tokenizer.
    """
    root, manifest, cache = _open_manifest(data)
    tokenizer_file = check_tokenizer(root, manifest, Path(data.tokenizer) if data.tokenizer else None)
    raise_on_all_ranks(partial(_check_tokenizer_on_rank_0, tokenizer_file, manifest))
    train, test = select_domains(data, manifest)
    weights = None if data.weights is None else domain_weights(data.weights, train, manifest)
    suspect = frozenset(chain.from_iterable(gather_objects(sorted(failed))))
    verifier = ShardVerifier(root, {} if data.verify == "sha256_always" else known or {}, suspect)
    splits = {"train": train, "validation": train, "test": test}
    damages = _check_splits(verifier, manifest, splits, data, cache, suspect)
    size_warning = None if cache is None else cache.size_warning(_readable_shards(manifest, train, damages))
    # An open file keeps its disk space after the cache has evicted it. If the training shards exceed the cache's limit,
    # only one shard may therefore be open at a time.
    max_open = None if size_warning is None else 1
    store = TokenStore(root, manifest, "train", train, None if cache is None else cache.pin_shard, max_open)
    samples = TrainingSamples(store, data.seq_length, seed, weights, [damage.shard for damage in damages])
    gathered = gather_objects((verifier.stamps, verifier.num_unchanged))
    found = {path: stamp for stamps, _ in gathered for path, stamp in stamps.items()}
    num_unchanged = sum(count for _, count in gathered)
    warnings = [] if size_warning is None else [f"selectron: warning: {size_warning}"]
    record = data_record(manifest, train, test, seq_length=data.seq_length, seed=seed, weights=weights)
    return RunData(
        root, manifest, tokenizer_file, train, test, samples, weights, damages, found, num_unchanged, warnings, record
    )


def open_evaluation_data(data: DataConfig) -> tuple[Path, Manifest, list[str], list[str]]:
    """Check the manifest and the evaluation text, but not the training text; a collective call.

    Returns:
        Folder of the manifest (see `RunData.root`), manifest, training domains and test domains (see `select_domains`).

    Raises:
        UserError: see `open_data`.
    """
    root, manifest, cache = _open_manifest(data)
    train, test = select_domains(data, manifest)
    _check_splits(ShardVerifier(root, {}), manifest, {"validation": train, "test": test}, data, cache, frozenset())
    return root, manifest, train, test


def select_domains(data: DataConfig, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Return the domains to train on and to test on, by their names in the manifest.

    By default all domains with test text are tested, except those that have training text but are not trained on.

    Raises:
        UserError: a named domain or a split does not exist.
    """
    train = _domains_of_split(manifest, "train", data.train_domains)
    untrained = set(manifest.domain_names("train")).difference(train)
    default = [name for name in manifest.domain_names("test") if name not in untrained]
    return train, _domains_of_split(manifest, "test", default if data.test_domains is None else data.test_domains)


def _check_tokenizer_on_rank_0(tokenizer_file: Path, manifest: Manifest) -> None:
    if dist.get_rank() == 0:
        check_vocabulary(tokenizer_file, manifest.tokenizer)


def _open_manifest(data: DataConfig) -> tuple[Path, Manifest, ShardCache | None]:
    """Return the manifest's folder, the manifest, and the cache of remote data (None for local data)."""
    cache = ShardCache(data.path, Path(data.cache_dir or ""), data.cache_gib) if is_url(data.path) else None
    root = Path(data.path) if cache is None else cache.root
    return root, load_manifest(root), cache


def _check_splits(
    verifier: ShardVerifier,
    manifest: Manifest,
    domains: dict[str, list[str]],
    data: DataConfig,
    cache: ShardCache | None,
    suspect: frozenset[str],
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
        calls = _check_arguments(verifier, split, data, cache, suspect)
        for arguments in calls:
            if split == "train" and data.on_damaged == "skip":
                damages += _gather_damages(partial(find_damage, verifier.root, manifest, split, present, **arguments))
            else:
                raise_on_all_ranks(partial(verify_shards, verifier.root, manifest, [split], present, **arguments))
    return sorted(damages, key=lambda damage: damage.shard)


def _check_arguments(
    verifier: ShardVerifier, split: str, data: DataConfig, cache: ShardCache | None, suspect: frozenset[str]
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call of `verify_shards` or `find_damage`: check, threads and ranks.

    The ranks divide the shards, except evaluation shards of remote data, which are downloaded to every machine. Only
    the existence and size of remote training shards are checked, at their URL. A shard that an earlier start failed to
    read is verified in full by one rank of each machine, because each machine may have its own copy.
    """
    shared: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    normal_check: Check = verifier.check
    full_check: Check = verifier.check
    threads = THREADS
    if cache is not None:
        full_check = cache.refetch
        if split == "train":
            normal_check, threads = cache.check, 1  # threads would not help: one request lists the sizes of many shards
        else:
            normal_check, shared = cache.fetch, {}
    elif data.verify == "size":
        normal_check = partial(check_here, verifier.root, "size")
        full_check = partial(check_here, verifier.root, "sha256")
    if not suspect:
        return [{"check": normal_check, "threads": threads, **shared}]
    check_others = _restrict_check(lambda shard: shard not in suspect, normal_check)
    check_suspect = _restrict_check(lambda shard: shard in suspect and local_rank() == 0, full_check)
    return [{"check": check_others, "threads": threads, **shared}, {"check": check_suspect}]


def _restrict_check(condition: Callable[[str], bool], check: Check) -> Check:
    """Restrict a check to the shards whose tar file name in the manifest satisfies `condition`."""

    def check_some(shard: ShardEntry) -> None:
        if condition(shard.file):
            check(shard)

    return check_some


def _gather_damages(find: Callable[[], list[Damage]]) -> list[Damage]:
    """Merge the damages that the ranks find, each shard once; a collective call."""
    found: list[Damage] = []
    raise_on_all_ranks(lambda: found.extend(find()))
    gathered = chain.from_iterable(gather_objects([asdict(damage) for damage in found]))
    return list({fields["shard"]: Damage(**fields) for fields in gathered}.values())


def _readable_shards(manifest: Manifest, domains: list[str], damages: Sequence[Damage]) -> list[ShardEntry]:
    """Return the training shards that are not damaged."""
    damaged = {damage.shard for damage in damages}
    entries = manifest.select("train", domains)
    return [shard for entry in entries for shard in entry.shards if shard.file not in damaged]


def _domains_of_split(manifest: Manifest, split: str, requested: list[str] | None) -> list[str]:
    """Return the requested domains of a split by the manifest's names, sorted; all domains if `requested` is None."""
    present = manifest.domain_names(split)
    for name in (requested or []) if present else []:
        if match_domain(name, present) is None:
            problem = f"no domain {name} in the {split} split of the data"
            raise UserError(f"data.{split}_domains", problem, f"choose from: {', '.join(present)}")
    return sorted({entry.domain for entry in manifest.select(split, requested)})


def packing_from_config(data: DataConfig) -> Packing:
    """Return which arrays about documents a batch contains: boundaries, positions, and documents kept apart."""
    separate = data.reset_attention
    return Packing(data.document_boundaries or separate, data.reset_positions or separate, separate)


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
