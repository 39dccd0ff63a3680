"""Parity of every mixer and layout with one process: losses, gradient norms and parameters over two steps.

Several mixers share a model: see `parity_covering.py`. `make test-exhaustive` compares each by itself under every
layout, too.

Runs are in fp32, and the reference never recomputes activations. In principle, rounding differences between layouts
could change a Top-1 choice. With the seed in parity.py no two scores are that close.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import parity
import pytest
from covering import EXHAUSTIVE, cases
from parity import Outcome
from parity_cases import LAYOUTS, MODELS, Model, chunks
from parity_covering import Case, chosen, exchanges, full_product
from pool import WorkerPool

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.mixers.core.registry import load_all

LOSS, NORM, PARAMETER = 2e-6, 1e-6, 2e-5
# Five times the measured difference of two layouts. A parameter may differ by one rounding of a weight near 1 (2**-7).
# Rounding flips the sign of some outputs of linear attention (see `MODELS`): over five seeds its norms differ by up to
# 5.6e-3.
BF16 = 2e-3, 5e-3, 1e-2
BF16_NORMS = {"linear_attention": 3e-2}


_references: dict[str, Outcome] = {}


def _reference(pool: WorkerPool, model: Model, **fields: Any) -> Outcome:
    """Train in one process without recomputation, over two micro-batches. Once per session for each model."""
    config = parity.run_config(model.pattern, model.mixers, model.model, {}, **{"micro_batch_size": 4, **fields})
    key = repr(config)
    if key not in _references:
        _references[key] = pool.run(parity.train, 1, config)[0]
    return _references[key]


def _train(pool: WorkerPool, model: Model, world_size: int, parallel: dict[str, Any], **fields: Any) -> Outcome:
    fields.setdefault("micro_batch_size", _micro_batch_size(world_size, parallel))
    config = parity.run_config(model.pattern, model.mixers, model.model, parallel, **fields)
    return pool.run(parity.train, world_size, config)[0]


def _micro_batch_size(world_size: int, parallel: dict[str, Any]) -> int:
    """Micro-batch size for accumulation over two micro-batches, or four if all ranks are pipeline stages."""
    stages = parallel.get("pipeline", 1)
    replicas = world_size // (parallel.get("tensor", 1) * parallel.get("context", 1) * stages)
    return 2 if replicas == 2 or stages == world_size else 4


def _check(outcome: Outcome, reference: Outcome, loss: float = LOSS, norm: float = NORM, parameter: float = PARAMETER):
    assert outcome.tokens == reference.tokens
    assert len(set(reference.tokens)) == parity.STEPS  # masked tokens differ between steps
    assert outcome.losses == pytest.approx(reference.losses, abs=loss, rel=0)
    assert outcome.norms == pytest.approx(reference.norms, rel=norm, abs=0)
    assert max(reference.norms) > parity.CLIP
    assert outcome.parameters.keys() == reference.parameters.keys()
    far = {
        name: float((outcome.parameters[name] - value).abs().max())
        for name, value in reference.parameters.items()
        if not (outcome.parameters[name] - value).abs().max() <= parameter
    }
    assert far == {}


def _cases() -> list[Any]:
    return [
        pytest.param(case, id=case.id, marks=() if case.models == ("hybrid",) else pytest.mark.slow)
        for case in dict.fromkeys([*chosen(), *(full_product() if EXHAUSTIVE else ())])
    ]


@pytest.mark.parametrize("case", _cases())
def test_a_layout_gives_the_numbers_of_one_process(pool: WorkerPool, case: Case) -> None:
    world_size, parallel = LAYOUTS[case.layout]
    fields: dict[str, Any] = {"recompute": case.recompute, "sharding": case.sharding}
    if case.models != ("hybrid",) and parallel:
        # Two micro-batches under pipeline parallelism, else one: the hybrid model covers accumulation.
        fields["micro_batch_size"] = 4 if "pipeline" in parallel else 8
    outcome = _train(pool, case.model, world_size, parallel, **fields)
    _check(outcome, _reference(pool, case.model))
    if parallel.get("context", 1) > 1:
        assert set(outcome.exchanges) - {"heads_to_sequence", "to_zigzag"} == exchanges(case.model, parallel)


# The feed-forwards of the second block read the previous token, which context parallelism may place on another rank.
@pytest.mark.parametrize(
    ("name", "layout"),
    [("hybrid", "tp2_sp"), ("rwkv7_block", "tp2_sp"), pytest.param("rwkv7_block", "cp2", marks=pytest.mark.slow)],
)
def test_feed_forwards_and_norms_are_recomputed(pool: WorkerPool, name: str, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    outcome = _train(pool, MODELS[name], world_size, parallel, recompute="mlp", micro_batch_size=8)
    _check(outcome, _reference(pool, MODELS[name]))


SHIFTED = ["rwkv7_block", "rwkv6", "rwkv7"]  # by default without the last, whose mixer is also in the first


@pytest.mark.parametrize("name", cases(every=SHIFTED, default=SHIFTED[:2]))
def test_tokens_are_shifted_over_sequence_and_context_parallel_ranks(pool: WorkerPool, name: str) -> None:
    """The row before a rank's first is on the previous tensor-parallel or context-parallel rank."""
    parallel = {"tensor": 2, "sequence": True, "context": 2}
    _check(_train(pool, MODELS[name], 4, parallel, micro_batch_size=8), _reference(pool, MODELS[name]))


# Mixers with several feature tensors, with features shared by all heads, and with a token shift.
IN_ROUNDS = ["top1_chunk_exact", "hybrid", "mamba", "mamba2", "rwkv7_block"]


@pytest.mark.parametrize("name", cases(every=[*IN_ROUNDS, "attention", "rwkv6"], default=IN_ROUNDS))
def test_heads_are_exchanged_in_rounds(pool: WorkerPool, name: str) -> None:
    """Rounds are groups of heads if a micro-batch is one sample, else samples."""
    parallel = {"context": 2, "context_exchange": "heads", "context_exchange_rounds": 2}
    for micro_batch_size, sent in ((1, 1), (2, 2)):
        sizes = {"micro_batch_size": micro_batch_size, "global_batch_size": 2}
        outcome = _train(pool, MODELS[name], 2, parallel, **sizes)
        _check(outcome, _reference(pool, MODELS[name], micro_batch_size=2, global_batch_size=2))
        there, back = (outcome.exchanges[exchange] for exchange in ("sequence_to_heads", "heads_to_sequence"))
        rounds = 1 if name == "mamba" else 2 // sent  # its heads are not independent
        assert back == rounds * there > 0
        assert there % sent == 0


def test_samples_are_exchanged_in_rounds_and_their_heads_in_more(pool: WorkerPool) -> None:
    model = Model(MODELS["hybrid"].pattern, MODELS["hybrid"].mixers, {"num_attention_heads": 8})
    parallel = {"context": 2, "context_exchange": "heads", "context_exchange_rounds": 4}
    sizes = {"micro_batch_size": 2, "global_batch_size": 2}
    outcome = _train(pool, model, 2, parallel, **sizes)
    _check(outcome, _reference(pool, model, **sizes))
    assert outcome.exchanges["heads_to_sequence"] == 2 * outcome.exchanges["sequence_to_heads"] > 0


GATHERING = [
    name
    for name, model in MODELS.items()
    if all(load_all()[mixer].traits.supports_kv_gather for mixer in parse_pattern(model.pattern))
]
RECOMPUTED_GATHERING = ["attention_window_gqa", "nsa_gqa"]
# By default, one variant of each mixer and attention's two other kinds of mask, each with or without recomputation.
DEFAULT_GATHERING = ["attention", "attention_alibi", "top1_chunk_exact", "top1_element", "moba"]

# With a window all queries cost the same, so none move. In NSA the gates stay with their queries.
KEEPING_QUERIES = {"attention_window_gqa", "nsa_gqa"}


@pytest.mark.parametrize(
    ("name", "recompute"),
    cases(
        every=[(name, "none") for name in GATHERING]
        + [(name, "full") for name in [*RECOMPUTED_GATHERING, "attention"]],
        default=[(name, "none") for name in DEFAULT_GATHERING] + [(name, "full") for name in RECOMPUTED_GATHERING],
    ),
)
def test_groups_that_do_not_divide_by_the_context_gather_keys_and_values(
    pool: WorkerPool, name: str, recompute: str
) -> None:
    model = Model(MODELS[name].pattern, MODELS[name].mixers, {"num_query_groups": 1})
    outcome = _train(pool, model, 2, LAYOUTS["cp2"][1], recompute=recompute, micro_batch_size=8)
    _check(outcome, _reference(pool, model))
    assert outcome.exchanges["gather_sequence"] > 0
    assert ("to_zigzag" in outcome.exchanges) == (name not in KEEPING_QUERIES)
    assert "sequence_to_heads" not in outcome.exchanges


@pytest.mark.parametrize(
    ("score", "context", "size", "exchange"),
    [
        ("exact", 4, 8, "fetch_blocks"),  # one chunk per rank
        pytest.param("approx", 4, 4, "fetch_blocks", marks=pytest.mark.slow),
        pytest.param("exact", 2, 32, "gather_sequence", marks=pytest.mark.slow),  # a chunk spans two ranks
    ],
)
def test_groups_that_do_not_divide_by_the_context_fetch_chunks_where_they_can(
    pool: WorkerPool, score: str, context: int, size: int, exchange: str
) -> None:
    model = Model("top1_chunk*2", chunks(score, chunk_size=size), {"num_query_groups": 1})
    outcome = _train(pool, model, context, {"context": context}, micro_batch_size=8)
    _check(outcome, _reference(pool, model))
    assert set(outcome.exchanges) - {"to_zigzag"} == {exchange}


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"pipeline": 2}),
        (2, LAYOUTS["tp2"][1]),
        (4, {"tensor": 2, "pipeline": 2, "sequence": True}),
        pytest.param(2, {"pipeline": 2, "virtual_pipeline": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2}, marks=pytest.mark.slow),  # with a data-parallel size of 2
    ],
)
def test_tied_embeddings_are_one_weight_on_two_stages(
    pool: WorkerPool, world_size: int, parallel: dict[str, Any]
) -> None:
    model = Model("top1_chunk,gated_deltanet,attention*2", chunks("exact"), {"tie_embeddings": True})
    reference = _reference(pool, model)
    assert not [name for name in reference.parameters if "output_layer" in name]
    _check(_train(pool, model, world_size, parallel), reference)


@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_counts_the_parameters_of_the_whole_model(pool: WorkerPool, tied: bool) -> None:
    model = Model("top1_chunk,gated_deltanet,attention*2", chunks("exact"), {"tie_embeddings": tied})
    sizes = {name: x.numel() for name, x in _reference(pool, model).parameters.items()}
    vocabulary = [count for name, count in sizes.items() if "word_embeddings" in name or "output_layer" in name]
    assert len(vocabulary) == 2 - tied
    expected = (sum(sizes.values()), vocabulary[0], 0 if tied else vocabulary[0])
    layouts = [(1, {}), (2, {"pipeline": 2, "virtual_pipeline": 2}), (4, {"tensor": 2, "pipeline": 2})]
    for world_size, parallel in layouts:
        config = parity.run_config(model.pattern, model.mixers, model.model, parallel)
        for counted in pool.run(parity.model_size, world_size, config):
            assert tuple(asdict(counted).values()) == expected, parallel


# Without Top-1 Element: rounding changes its choices, and each changed choice is a finite step.
IN_BF16 = [
    ("attention", "top1_chunk_exact", "moba"),
    ("nsa_gqa",),
    ("deltanet", "gated_deltanet", "gla", "retnet"),
    ("linear_attention",),
    ("based", "mamba", "mamba2", "rwkv6"),
    ("rwkv7_block",),
]
BF16_CASES = [*((names, "tp2") for names in IN_BF16), (("gated_deltanet",), "cp2"), (("gated_deltanet",), "pp2")]
ALONE_IN_BF16 = [((name,), "tp2") for names in IN_BF16 if len(names) > 1 for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "layout"),
    cases(every=[*BF16_CASES, (("top1_chunk_exact",), "cp2"), *ALONE_IN_BF16], default=BF16_CASES),
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_layouts_in_bf16_are_as_close_as_its_rounding_lets_them(
    pool: WorkerPool, names: tuple[str, ...], layout: str
) -> None:
    model = Case(names, layout, "none").model
    reference = _reference(pool, model, precision="bf16")
    outcome = _train(pool, model, *LAYOUTS[layout], precision="bf16")
    loss, norm, parameter = BF16
    _check(outcome, reference, loss, BF16_NORMS.get(names[0], norm), parameter)
    # Check that the run is really in bf16: it is closer to the bf16 reference than a run in fp32 would be.
    exact = _reference(pool, model)
    assert outcome.losses == pytest.approx(exact.losses, abs=0.05)
    assert outcome.losses != pytest.approx(exact.losses, abs=1e-5)


def test_one_process_is_plain_autograd_over_the_whole_batch(pool: WorkerPool) -> None:
    """The reference weights each token equally, not each micro-batch, although token counts differ."""
    config = parity.run_config(MODELS["hybrid"].pattern, MODELS["hybrid"].mixers, {}, {})
    loss, norm = pool.run(parity.plain_first_step, 1, config)[0]
    reference = _reference(pool, MODELS["hybrid"])
    assert reference.losses[0] == pytest.approx(loss, abs=LOSS)
    assert reference.norms[0] == pytest.approx(norm, rel=NORM)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}], ids=str)
def test_data_parallelism_beside_model_parallelism(pool: WorkerPool, parallel: dict[str, Any]) -> None:
    """Distributed optimizer over parameters that model parallelism has split already, on four processes."""
    _check(_train(pool, MODELS["hybrid"], 4, parallel), _reference(pool, MODELS["hybrid"]))
