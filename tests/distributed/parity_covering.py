"""Cases of `test_parity.py`: fewer than the full product of models, layouts, recomputation and sharding.

By default, the hybrid model is compared under every layout, and other models under those layouts that together execute
all code of a mixer. A case trains several mixers as the layers of one model. Every pair of values in these comparisons,
such as a mixer and a layout, is in at least one case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, cycle, islice
from typing import Any

from covering import cover
from parity_cases import LAYOUTS, MODELS, TWO, Model, compared, deep_enough

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.mixers.core.registry import load_all

# Layouts under which every model is compared by default. Together they execute all code of a mixer: heads split with
# and without sequence parallelism, the first and the last pipeline stage, and each exchange. In other layouts only the
# schedule or the sharding differs, whose code is the same for all mixers. The hybrid model is compared under all.
FOR_EVERY_MODEL = {"tp2_sp", "pp2", "cp2_states", "cp2_chunks", "tp2_pp2_sp", "tp2_cp2"}

LAYERS = 4  # of a model of several mixers: divisible by all numbers of (virtual) pipeline stages

Pair = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Case:
    """One run to compare with one process.

    Attributes:
        models: names in `MODELS`. Several give one model with a layer of each in turn.
        layout: name in `LAYOUTS`.
        recompute: `training.recompute`.
        sharding: `optimizer.sharding`.
    """

    models: tuple[str, ...]
    layout: str
    recompute: str
    sharding: str = "megatron"

    @property
    def id(self) -> str:
        more = () if self.sharding == "megatron" else (f"sharding_{self.sharding}",)
        return "-".join(["+".join(self.models), self.layout, self.recompute, *more])

    @property
    def model(self) -> Model:
        """Model to train."""
        parallel = LAYOUTS[self.layout][1]
        parts = [MODELS[name] for name in self.models]
        if len(parts) == 1:
            return deep_enough(parts[0], parallel)
        mixers = list(islice(cycle(parse_pattern(part.pattern)[0] for part in parts), LAYERS))
        # Backwards under two layouts with pipeline stages, so that each mixer is on the first and on the last stage.
        if parallel.get("pipeline", 1) > 1 and self.layout not in TWO:
            mixers.reverse()
        return Model(",".join(mixers), {k: v for part in parts for k, v in part.mixers.items()}, parts[0].model)

    @cached_property
    def pairs(self) -> set[Pair]:
        """Pairs of values that are together in this case, each value with the name of its axis."""
        names = {*self.models}
        if len(self.models) == 1:
            names |= {name for name in MODELS if _is_within(name, self.models[0], self.layout)}
        fields = {("layout", self.layout), ("recompute", self.recompute), ("sharding", self.sharding)}
        pairs = {frozenset(pair) for pair in combinations(fields, 2)}
        return pairs | {frozenset({("model", name), field}) for name in names for field in fields}


def full_product() -> list[Case]:
    """Every model under every layout, by itself. Recomputation is on in two processes and off in four.

    The hybrid model has it on and off everywhere, and an unsharded optimizer under two kinds of model parallelism.
    """
    cases = [
        Case((name,), layout, recompute)
        for name, layout in compared()
        for recompute in ("none", "full")
        if name == "hybrid" or recompute == ("full" if layout in TWO else "none")
    ]
    return cases + [Case(("hybrid",), layout, "none", "none") for layout in ("dp2", "tp2_pp2_sp", "tp2_cp2")]


def is_default(name: str, layout: str) -> bool:
    """Return True if a model is compared under a layout by default.

    Besides `FOR_EVERY_MODEL`, this is `cp2` for models whose exchanges there are not compared under `tp2_cp2`.
    """
    if name == "hybrid" or layout in FOR_EVERY_MODEL:
        return True
    model = MODELS[name]
    has_every_layout = model.layouts == ()
    same_exchanges = exchanges(model, LAYOUTS["cp2"][1]) == exchanges(model, LAYOUTS["tp2_cp2"][1])
    return layout == "cp2" and not (has_every_layout and same_exchanges)


def default_product() -> list[Case]:
    """Cases of the full product whose model is compared under its layout by default."""
    return [case for case in full_product() if is_default(case.models[0], case.layout)]


@cache
def chosen() -> list[Case]:
    """Cases that together contain all pairs of the default product."""
    candidates = [
        Case(models, layout, recompute, sharding)
        for layout in LAYOUTS
        for models in _rows(layout)
        for recompute, sharding in (("none", "megatron"), ("full", "megatron"), ("none", "none"))  # cheapest first
    ]
    return cover(candidates, lambda case: case.pairs, {pair for case in default_product() for pair in case.pairs})


def _rows(layout: str) -> Iterator[tuple[str, ...]]:
    """Share the models compared under a layout out among cases. Models that another one holds have none of their own.

    Models in one case have different mixers and the same other fields. Under context parallelism they also have the
    same exchanges: a mixer that used another one by mistake would be found out in a model by itself, and is here.
    """
    names = [name for name, held in compared() if held == layout]
    names = [name for name in names if not any(_is_within(name, other, layout) for other in names)]
    open_rows: list[tuple[Any, list[str]]] = []
    for name in names:
        model = MODELS[name]
        key = (model.layouts, model.model, exchanges(model, LAYOUTS[layout][1]))
        for other, row in open_rows:
            alone = "," in model.pattern or "," in MODELS[row[0]].pattern
            if other == key and not alone and len(row) < LAYERS and _mixer(name) not in map(_mixer, row):
                row.append(name)
                break
        else:
            open_rows.append((key, [name]))
    yield from (tuple(row) for _, row in open_rows)


def _mixer(name: str) -> str:
    return parse_pattern(MODELS[name].pattern)[0]


def _is_within(name: str, other: str, layout: str) -> bool:
    """Return True if a model of several mixers covers a model of one, its exchanges under this layout included."""
    one, several, mixer, parallel = MODELS[name], MODELS[other], _mixer(name), LAYOUTS[layout][1]
    return (
        len({*parse_pattern(one.pattern)}) == 1 < len({*parse_pattern(several.pattern)})
        and mixer in parse_pattern(several.pattern)
        and one.mixers.get(mixer) == several.mixers.get(mixer)
        and one.model == several.model
        and exchanges(one, parallel) == exchanges(several, parallel)
    )


def exchanges(model: Model, parallel: dict[str, Any]) -> frozenset[str]:
    """Exchanges that a model's mixers must use under a layout: none without context parallelism."""
    if parallel.get("context", 1) == 1:
        return frozenset()
    # Four heads are divisible by every context-parallel size here. The groups of some models under tp2_cp2 are not.
    groups_divide = model.model.get("num_query_groups", 4) // parallel.get("tensor", 1) % parallel["context"] == 0
    names, kind = set(), parallel["context_exchange"]
    for mixer in parse_pattern(model.pattern):
        traits = load_all()[mixer].traits
        divides = groups_divide or not traits.head_groups_are_query_groups
        if traits.chunk_field is not None and (kind == "chunks" or (not divides and kind != "heads")):
            names.add("fetch_blocks")
        elif traits.supports_state_passing and (kind != "heads" or not divides):
            # With `auto`, which compares bytes, states are smaller than heads in these models.
            # Only a matrix-valued state has a `state_shape`.
            elementwise = load_all()[mixer].module.state_shape is Mixer.state_shape
            names.add("diagonal_state_before" if elementwise else "context_parallel_scan")
        else:
            names.add("sequence_to_heads" if divides else "gather_sequence")
    return frozenset(names)
