"""Cases chosen for `test_parity.py` against the full product."""

from __future__ import annotations

import parity
from parity_cases import LAYOUTS, MODELS, compared
from parity_covering import Case, chosen, default_product, exchanges, full_product

from megatron_ext.config.layout import sequence_parallel
from megatron_ext.config.pattern import parse_pattern

FIELDS = ("layout", "recompute", "sharding")


def trained(case: Case) -> set[str]:
    """Models with all of whose mixers, their settings and other fields a case trains, under the same exchanges."""
    parallel, whole = LAYOUTS[case.layout][1], case.model
    return {
        name
        for name, model in MODELS.items()
        if {*parse_pattern(model.pattern)} <= {*parse_pattern(whole.pattern)}
        and all(
            model.mixers.get(mixer) == whole.mixers.get(mixer) and model.model == whole.model
            for mixer in parse_pattern(model.pattern)
        )
        and exchanges(model, parallel) == exchanges(whole, parallel)
    }


def test_every_pair_of_the_default_product_is_chosen() -> None:
    product, cases = default_product(), chosen()
    for field in FIELDS:
        wanted = {(case.models[0], getattr(case, field)) for case in product}
        assert wanted <= {(name, getattr(case, field)) for case in cases for name in trained(case)}
        for other in FIELDS:
            wanted = {(getattr(case, field), getattr(case, other)) for case in product}
            assert wanted <= {(getattr(case, field), getattr(case, other)) for case in cases}
    assert {(case.models[0], case.layout) for case in full_product()} == {*compared()}
    assert len(cases) < len(product) / 2


def test_the_default_product_holds_every_layout_and_each_exchange_of_every_mixer() -> None:
    product = default_product()
    for field in FIELDS:
        values = {getattr(case, field) for case in full_product()}
        assert {getattr(case, field) for case in product if case.models == ("hybrid",)} == values
    for name, model in MODELS.items():
        every, kept = ({case.layout for case in of if case.models == (name,)} for of in (full_product(), product))
        assert {"tp2_sp", "pp2"} & every <= kept
        found, wanted = ({exchanges(model, LAYOUTS[layout][1]) for layout in of} for of in (kept, every))
        assert found == wanted, name


def test_layouts_use_sequence_parallelism_where_their_names_say_so() -> None:
    """With TP, some gradients are summed over ranks only with sequence parallelism, others only without."""
    model = MODELS["hybrid"]
    configs = {name: parity.run_config(model.pattern, model.mixers, model.model, p) for name, (_, p) in LAYOUTS.items()}
    used = {name: sequence_parallel(config) for name, config in configs.items() if config.parallel.tensor > 1}
    assert used == {name: name.endswith("_sp") for name in used}
    assert set(used.values()) == {True, False}


def test_a_mixer_that_shares_a_model_is_on_each_pipeline_stage() -> None:
    places: dict[str, set[int]] = {}
    for case in chosen():
        parallel = LAYOUTS[case.layout][1]
        stages = parallel.get("pipeline", 1)
        pieces, mixers = stages * parallel.get("virtual_pipeline", 1), parse_pattern(case.model.pattern)
        for layer, mixer in enumerate(mixers if stages > 1 else ()):
            places.setdefault(mixer, set()).add(layer * pieces // len(mixers) % stages)
    assert set(map(frozenset, places.values())) == {frozenset({0, 1})}
    assert places.keys() == {mixer for model in MODELS.values() for mixer in parse_pattern(model.pattern)}


def test_cases_have_different_names_and_are_chosen_alike_each_time() -> None:
    names = [case.id for case in [*chosen(), *full_product()]]
    assert names == [case.id for case in [*chosen.__wrapped__(), *full_product()]]
    assert len({*names[: len(chosen())]}) == len(chosen())
