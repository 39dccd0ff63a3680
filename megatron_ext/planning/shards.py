"""Model shards of all ranks of a world, built in a single process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.config.schema import RunConfig
from megatron_ext.model.build import build_model
from megatron_ext.model.meta_device import on_meta
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.parameters import count_parameters
from megatron_ext.planning.virtual_gpu import groups_of_rank, simulated_config, virtual_gpu


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Model shard of a rank.

    Attributes:
        rank: global rank.
        place: tensor-, context-, pipeline- and data-parallel rank.
        parameters: number of parameters on the rank.
        of_stage: number of parameters on the rank's tensor-parallel group, each counted once.
    """

    rank: int
    place: tuple[int, int, int, int]
    parameters: int
    of_stage: int


def build_shards(config: RunConfig, vocab_size: int, world_size: int, ranks: Iterable[int]) -> list[Shard]:
    """Build the shards of `ranks`; see `dry_step.footprint` for the other arguments."""
    return [_build_shard(config, vocab_size, world_size, rank) for rank in ranks]


def _build_shard(config: RunConfig, vocab_size: int, world_size: int, rank: int) -> Shard:
    gpu = virtual_gpu()
    with groups_of_rank(config.parallel, world_size, rank) as groups:
        with on_meta():
            chunks = build_model(model_shape(simulated_config(config), gpu, vocab_size), gpu, groups, seed=None)
        return Shard(
            rank=rank,
            place=(groups.tp.rank(), groups.cp.rank(), groups.pp.rank(), groups.dp.rank()),
            parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            of_stage=count_parameters(chunks, groups.tp.size()).parameters,
        )


def whole_model(shards: Sequence[Shard]) -> int:
    """Return the number of parameters of the whole model that the shards form.

    Raises:
        AssertionError: ranks of a stage differ in `of_stage`, or two ranks have the same `place`.
    """
    assert len({shard.place for shard in shards}) == len(shards), "two ranks are in one place"
    stage_counts: dict[int, set[int]] = {}
    for shard in shards:
        stage_counts.setdefault(shard.place[2], set()).add(shard.of_stage)
    assert all(len(counts) == 1 for counts in stage_counts.values()), f"stages differ within themselves: {stage_counts}"
    return sum(counts.pop() for counts in stage_counts.values())
