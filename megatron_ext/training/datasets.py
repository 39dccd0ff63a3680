"""The run's data, checked before the first step."""

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
from megatron_ext.errors import UserError
from megatron_ext.files import is_url
from megatron_ext.parallel.agreement import from_every_rank, on_every_rank
from megatron_ext.platform import local_rank


@dataclass(frozen=True)
class RunData:
    """Prepared data that was found whole.

    Attributes:
        root: folder of the manifest; a cache's own of data that lies elsewhere.
        manifest: what it holds.
        tokenizer_file: of the tokenizer that made its tokens.
        train_domains: trained on.
        test_domains: tested on, out of domain or, those that are trained on, in domain.
        samples: training samples in the run's order.
        weights: of the training domains, if they have any.
        damages: shards of training text that the samples do without.
        verified: files whose sha256 was compared, by all ranks; see `Verified`.
        unchanged: how many of them an earlier start of the run had read.
        warnings: what the run can be made without, and the user should know.
        record: what is trained and evaluated on, see `data_record`.
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
        """Tokens of the tokenizer."""
        return self.manifest.tokenizer.vocab_size


def open_data(
    data: DataConfig, seed: int, known: Mapping[str, Stamp] | None = None, failed: Iterable[str] = ()
) -> RunData:
    """Check manifest, tokenizer and shards, and open the training samples; a collective call.

    The ranks share the work of reading the shards; an error that one finds is raised on all.

    Args:
        data: the run's data.
        seed: of the samples' order.
        known: what an earlier start of the run has compared; see `Verified`.
        failed: shards that failed while the run read them; every machine looks at them whole, whatever is known.

    Raises:
        UserError: something is missing, damaged or from another tokenizer.
    """
    root, manifest, cache = _opened(data)
    tokenizer_file = check_tokenizer(root, manifest, Path(data.tokenizer) if data.tokenizer else None)
    first_rank = partial(check_vocabulary, tokenizer_file, manifest.tokenizer) if dist.get_rank() == 0 else partial(int)
    on_every_rank(first_rank)
    train, test = chosen_domains(data, manifest)
    weights = None if data.weights is None else domain_weights(data.weights, train, manifest)
    doubted = frozenset(chain.from_iterable(from_every_rank(sorted(failed))))
    verified = Verified(root, {} if data.verify == "sha256_always" else known or {}, doubted)
    splits = {"train": train, "validation": train, "test": test}
    damages = _verified(verified, manifest, splits, data, cache, doubted)
    small = None if cache is None else cache.is_small_for(_read(manifest, train, damages))
    # What the cache has removed takes up room as long as it is open: below a limit only one of them may.
    most_open = None if small is None else 1
    store = TokenStore(root, manifest, "train", train, None if cache is None else cache.holding, most_open)
    samples = TrainingSamples(store, data.seq_length, seed, weights, [one.shard for one in damages])
    of_ranks = from_every_rank((verified.found, verified.unchanged))
    found = {path: stamp for one, _ in of_ranks for path, stamp in one.items()}
    unchanged = sum(count for _, count in of_ranks)
    warnings = [] if small is None else [f"selectron: warning: {small}"]
    record = data_record(manifest, train, test, seq_length=data.seq_length, seed=seed, weights=weights)
    return RunData(
        root, manifest, tokenizer_file, train, test, samples, weights, damages, found, unchanged, warnings, record
    )


def open_tests(data: DataConfig) -> tuple[Path, Manifest, list[str], list[str]]:
    """Check the manifest, and text to evaluate on, without training text; a collective call.

    Returns:
        Folder of the manifest, see `RunData.root`, what it holds, and `chosen_domains` of it.

    Raises:
        UserError: see `open_data`.
    """
    root, manifest, cache = _opened(data)
    train, test = chosen_domains(data, manifest)
    _verified(Verified(root, {}), manifest, {"validation": train, "test": test}, data, cache, frozenset())
    return root, manifest, train, test


def chosen_domains(data: DataConfig, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Domains to train on and to test on, by the manifest's names.

    Where no test domains are named they are all that have test text: those without training text, and those that are
    trained on. Of one that was prepared for training and is left out of it, nothing is evaluated unless it is named.

    Raises:
        UserError: a domain that is named, or the split, is not there.
    """
    train = _chosen(manifest, "train", data.train_domains)
    idle = set(manifest.domain_names("train")).difference(train)
    usual = [name for name in manifest.domain_names("test") if name not in idle]
    return train, _chosen(manifest, "test", usual if data.test_domains is None else data.test_domains)


def _opened(data: DataConfig) -> tuple[Path, Manifest, ShardCache | None]:
    """Folder of the manifest, the manifest, and the cache of data that lies elsewhere."""
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
    """Shards of training text to do without, the same on every rank; any other damage is an error."""
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
                on_every_rank(partial(verify_shards, verified.root, manifest, [split], present, **look))
    return sorted(damages, key=lambda one: one.shard)


def _looks(
    verified: Verified, split: str, data: DataConfig, cache: ShardCache | None, doubted: frozenset[str]
) -> list[dict[str, Any]]:
    """How shards are checked: who checks which, and by what.

    The ranks share them. Of a cache, shards of training text are looked for at their address; the others are copied, to
    every machine. What has failed before is read whole by a rank of each machine: it may be whole on another one.
    """
    shared: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    usual: Check = verified.check
    whole: Check = verified.check
    threads = THREADS
    if cache is not None:
        whole = cache.renew
        if split == "train":
            usual, threads = cache.check, 1  # of a list that is here
        else:
            usual, shared = cache.keep, {}
    elif data.verify == "size":
        usual, whole = partial(check_here, verified.root, "size"), partial(check_here, verified.root, "sha256")
    if not doubted:
        return [{"check": usual, "threads": threads, **shared}]
    others: dict[str, Any] = {"check": _where(lambda shard: shard not in doubted, usual), "threads": threads, **shared}
    return [others, {"check": _where(lambda shard: shard in doubted and local_rank() == 0, whole)}]


def _where(wanted: Callable[[str], bool], check: Check) -> Check:
    """A check of some shards alone, by the name of their tar in the manifest."""

    def check_some(shard: ShardEntry) -> None:
        if wanted(shard.file):
            check(shard)

    return check_some


def _of_every_rank(find: Callable[[], list[Damage]]) -> list[Damage]:
    """What the ranks found together, each shard once."""
    found: list[Damage] = []
    on_every_rank(lambda: found.extend(find()))
    of_ranks = chain.from_iterable(from_every_rank([asdict(one) for one in found]))
    return list({one["shard"]: Damage(**one) for one in of_ranks}.values())


def _read(manifest: Manifest, domains: list[str], damages: Sequence[Damage]) -> list[ShardEntry]:
    """Shards of training text that samples are read from."""
    lost = {damage.shard for damage in damages}
    return [shard for entry in manifest.select("train", domains) for shard in entry.shards if shard.file not in lost]


def _chosen(manifest: Manifest, split: str, asked: list[str] | None) -> list[str]:
    """The manifest's own names of the domains asked for; all of the split where none are."""
    present = manifest.domain_names(split)
    for name in (asked or []) if present else []:
        if match_domain(name, present) is None:
            problem = f"no domain {name} in the {split} split of the data"
            raise UserError(f"data.{split}_domains", problem, f"choose from: {', '.join(present)}")
    return sorted({entry.domain for entry in manifest.select(split, asked)})


def packing_of(data: DataConfig) -> Packing:
    """What the batches of a run say of documents."""
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
    """This rank's micro-batches of the step that begins at a sample."""
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
