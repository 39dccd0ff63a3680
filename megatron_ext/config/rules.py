"""What cannot go together, and why: one table of rules, checked before a process group starts.

A rule is a function of `Facts` that returns None, or what is wrong and what to do. Its docstring gives the reason.
Rules run in the order in which they stand, and the first broken one is reported: a later one may rely on an earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.config.deepspeed import STAGES, deepspeed_config
from megatron_ext.config.derive import derive
from megatron_ext.config.layout import Layout, layout_of, model_parallel_size
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.suggest import unknown_mixer
from megatron_ext.config.traits import Mixers, fetched_chunk_size
from megatron_ext.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at, each computed once.

    Attributes:
        config: a whole configuration (see `derive`).
        layout: its layout on the world at hand.
        layers: a mixer's name for every layer.
        mixers: the registered mixers.
    """

    config: RunConfig
    layout: Layout
    layers: list[str]
    mixers: Mixers


Broken = tuple[str, str] | None
"""None: the rule holds; else (problem, mend)."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: its name, the field that it is reported on, and its test."""

    name: str
    field: str
    test: Callable[[Facts], Broken]


RULES: list[Rule] = []


def rule(field: str) -> Callable[[Callable[[Facts], Broken]], Callable[[Facts], Broken]]:
    """Add the decorated function to the table, reported on `field`."""

    def add(test: Callable[[Facts], Broken]) -> Callable[[Facts], Broken]:
        RULES.append(Rule(name=test.__name__, field=field, test=test))
        return test

    return add


def check(config: RunConfig, world_size: int, mixer_configs: Mixers) -> Layout:
    """Refuse what cannot run.

    Args:
        config: the configuration; derived fields are filled in for the check.
        world_size: processes of the run.
        mixer_configs: the registered mixers, by name.

    Returns:
        The layout of the run.

    Raises:
        UserError: the first broken rule.
    """
    config = derive(config)
    facts = Facts(
        config=config,
        layout=layout_of(config, world_size),
        layers=parse_pattern(config.model.pattern),
        mixers=mixer_configs,
    )
    for name in facts.layers:
        if name not in mixer_configs:
            raise unknown_mixer("model.pattern", name, mixer_configs)
    for one in RULES:
        broken = one.test(facts)
        if broken is not None:
            raise UserError(one.field, *broken)
    return facts.layout


def _does_not_divide(name: str, value: int, by: str, divisor: int, mend: str) -> Broken:
    """Return the error of a value that must be a multiple of another."""
    if value % divisor == 0:
        return None
    return f"{name} {value} does not divide by {by} {divisor}", mend


# --- processes -------------------------------------------------------------------------------------------------------


@rule("parallel")
def world_holds_whole_replicas(f: Facts) -> Broken:
    """Every process belongs to one whole replica of the model."""
    p, world = f.config.parallel, f.layout.world_size
    replica = model_parallel_size(p)
    if world % replica == 0:
        return None
    fitting = -(-world // replica) * replica
    return (
        f"tensor {p.tensor} * pipeline {p.pipeline} * context {p.context} = {replica} processes a replica, "
        f"and {world} do not divide by that",
        f"start a multiple of {replica} (--processes {fitting}), or lower one of the three",
    )


@rule("parallel.sequence")
def sequence_parallel_needs_tensor_parallel(f: Facts) -> Broken:
    """Sequence parallelism splits what tensor parallelism would hold on every rank."""
    p = f.config.parallel
    if not p.sequence or p.tensor > 1:
        return None
    return "true, with parallel.tensor 1", "set parallel.tensor above 1, or parallel.sequence=false"


@rule("parallel.virtual_pipeline")
def interleaving_needs_stages(f: Facts) -> Broken:
    """Model chunks are interleaved over pipeline stages."""
    p = f.config.parallel
    if p.virtual_pipeline == 1 or p.pipeline > 1:
        return None
    return f"{p.virtual_pipeline}, with parallel.pipeline 1", "set parallel.pipeline above 1, or virtual_pipeline to 1"


@rule("parallel.batch_p2p_comm")
def two_interleaved_stages_send_one_by_one(f: Facts) -> Broken:
    """Megatron's batched exchange between two stages' interleaved chunks is silently wrong: it mixes them up."""
    p = f.config.parallel
    if not p.batch_p2p_comm or p.virtual_pipeline == 1 or p.pipeline != 2:
        return None
    problem = f"true, with parallel.pipeline 2 and virtual_pipeline {p.virtual_pipeline}, gives wrong gradients"
    return problem, "leave it out, or set virtual_pipeline to 1"


# --- model -----------------------------------------------------------------------------------------------------------


@rule("model.num_query_groups")
def heads_divide_by_query_groups(f: Facts) -> Broken:
    """Every key/value head serves the same number of query heads."""
    m = f.config.model
    mend = "give a divisor of model.num_attention_heads"
    return _does_not_divide(
        "model.num_attention_heads", m.num_attention_heads, "num_query_groups", m.num_query_groups or 1, mend
    )


@rule("model.num_attention_heads")
def heads_divide_by_tensor(f: Facts) -> Broken:
    """Each tensor-parallel rank holds whole heads."""
    heads, tensor = f.config.model.num_attention_heads, f.config.parallel.tensor
    return _does_not_divide("num_attention_heads", heads, "parallel.tensor", tensor, "change one of them")


@rule("model.num_query_groups")
def query_groups_divide_by_tensor(f: Facts) -> Broken:
    """Each tensor-parallel rank holds whole key/value heads."""
    groups, tensor = f.config.model.num_query_groups or 1, f.config.parallel.tensor
    return _does_not_divide("num_query_groups", groups, "parallel.tensor", tensor, "change one of them")


@rule("model.ffn_hidden_size")
def a_mixer_alone_has_no_feed_forward(f: Facts) -> Broken:
    """A width of what is not there would count for nothing."""
    m = f.config.model
    if m.block != "mixer" or m.ffn_hidden_size is None:
        return None
    return f"{m.ffn_hidden_size}, with model.block mixer", "leave it out, or set model.block=transformer"


@rule("model.ffn_hidden_size")
def ffn_divides_by_tensor(f: Facts) -> Broken:
    """The feed-forward columns are split evenly over the tensor-parallel ranks."""
    width, tensor = f.config.model.ffn_hidden_size or 0, f.config.parallel.tensor
    return _does_not_divide("ffn_hidden_size", width, "parallel.tensor", tensor, f"give a multiple of {tensor}")


@rule("model.vocab_size_multiple")
def vocabulary_divides_by_tensor(f: Facts) -> Broken:
    """The vocabulary is split evenly, and its padding must not depend on the layout."""
    multiple, tensor = f.config.model.vocab_size_multiple, f.config.parallel.tensor
    return _does_not_divide("vocab_size_multiple", multiple, "parallel.tensor", tensor, f"give a multiple of {tensor}")


@rule("model.head_dim")
def head_dim_is_even(f: Facts) -> Broken:
    """Rotary position encoding turns pairs of coordinates."""
    head_dim = f.config.model.head_dim or 2
    if head_dim % 2 == 0:
        return None
    return f"{head_dim} is odd", "give an even head_dim, or another num_attention_heads"


@rule("model.max_position_embeddings")
def positions_cover_the_sequence(f: Facts) -> Broken:
    """A learned position table has a row for every token of a sample."""
    positions, seq_length = f.config.model.max_position_embeddings or 0, f.config.data.seq_length
    if positions >= seq_length:
        return None
    return f"{positions} is less than data.seq_length {seq_length}", f"give at least {seq_length}, or leave it out"


@rule("model.pattern")
def layers_divide_by_stages(f: Facts) -> Broken:
    """Megatron gives every stage, and every chunk of it, the same number of layers."""
    p = f.config.parallel
    chunks = p.pipeline * p.virtual_pipeline
    by = f"parallel.pipeline {p.pipeline} * virtual_pipeline {p.virtual_pipeline} ="
    return _does_not_divide("the number of layers,", len(f.layers), by, chunks, f"give a multiple of {chunks} layers")


# --- sequence --------------------------------------------------------------------------------------------------------


@rule("data.seq_length")
def sequence_divides_by_ranks(f: Facts) -> Broken:
    """Context parallelism splits the sequence evenly, sequence parallelism each part again."""
    p, seq_length = f.config.parallel, f.config.data.seq_length
    if p.sequence:
        by, ranks = f"parallel.tensor {p.tensor} * context {p.context} =", p.tensor * p.context
    else:
        by, ranks = "parallel.context", p.context
    return _does_not_divide("seq_length", seq_length, by, ranks, f"give a multiple of {ranks}")


@rule("parallel.context")
def heads_divide_by_context(f: Facts) -> Broken:
    """A mixer that neither gathers keys and values nor hands states on exchanges parts of the sequence for heads."""
    p, m = f.config.parallel, f.config.model
    for name in dict.fromkeys(f.layers):
        mixer = f.mixers[name]
        field = "num_query_groups" if mixer.units_are_groups else "num_attention_heads"
        units = getattr(m, field) or m.num_attention_heads
        local, hands_on = units // p.tensor, mixer.hands_on_states and p.context_exchange != "heads"
        if local % p.context == 0 or mixer.gathers_keys_and_values or hands_on:
            continue
        more = ", or set parallel.context_exchange=auto" if mixer.hands_on_states else ""
        return (
            f"{name} splits its heads, and {field} {units} / tensor {p.tensor} = {local} heads "
            f"do not divide by context {p.context}",
            f"choose a context that divides {local}, or change model.{field}{more}",
        )
    return None


@rule("parallel.context_exchange")
def fetched_chunks_lie_on_one_rank(f: Facts) -> Broken:
    """A chosen chunk is fetched from the one rank that holds it."""
    p, seq_length = f.config.parallel, f.config.data.seq_length
    if p.context == 1 or p.context_exchange != "chunks":
        return None
    for name in dict.fromkeys(f.layers):
        mixer = f.mixers[name]
        size = fetched_chunk_size(mixer, f.config.mixers.get(name, {}))
        if size is not None and seq_length // p.context % size:
            return (
                f"chunks, and data.seq_length {seq_length} / context {p.context} = {seq_length // p.context} does not "
                f"divide by mixers.{name}.{mixer.chunk_field} {size}",
                f"give a seq_length that is a multiple of {p.context * size}, or set parallel.context_exchange=auto",
            )
    return None


# --- data ------------------------------------------------------------------------------------------------------------


@rule("data.cache_dir")
def data_elsewhere_has_a_cache(f: Facts) -> Broken:
    """Samples are read in any order: over a network each would fetch its few kilobytes alone."""
    data = f.config.data
    if ("://" in data.path) == (data.cache_dir is not None):
        return None
    if data.cache_dir is None:
        return f"null, with data.path {data.path}", "give a folder on a local disk"
    return f"{data.cache_dir}, with data.path {data.path} on this machine", "leave it out"


@rule("data.cache_gib")
def limit_is_of_a_cache(f: Facts) -> Broken:
    """There is nothing else that it could limit."""
    data = f.config.data
    if data.cache_gib is None or data.cache_dir is not None:
        return None
    return f"{data.cache_gib:g}, without data.cache_dir", "leave it out"


@rule("data.train_domains")
def train_domains_are_a_set(f: Facts) -> Broken:
    """No training domains: nothing to learn; one named twice: a slip, since it would not count twice."""
    return _not_a_set(f.config.data.train_domains)


@rule("data.test_domains")
def test_domains_are_a_set(f: Facts) -> Broken:
    """No test domains: nothing to evaluate, which training.evaluate_every=0 says better."""
    return _not_a_set(f.config.data.test_domains)


@rule("data.test_domains")
def domains_are_disjoint(f: Facts) -> Broken:
    """A domain that is trained on is not out of domain."""
    data = f.config.data
    both = sorted(set(data.train_domains or []) & set(data.test_domains or []))
    if not both:
        return None
    return f"{', '.join(both)} is among data.train_domains too", "keep a domain for training or for the test"


@rule("data.weights")
def some_weight_is_positive(f: Facts) -> Broken:
    """Without one there is nothing to read."""
    weights = f.config.data.weights
    if weights is None or any(weights.values()):
        return None
    return f"{weights or 'no domain'} has no weight above 0", "give one, or leave it out: in proportion to tokens"


@rule("data.reset_positions")
def reset_positions_are_read(f: Facts) -> Broken:
    """Position ids go to a learned table; rotary angles and ALiBi are of distances, which the start does not change."""
    fields = [f.config.mixers.get(name, {}) for name in f.layers]
    if not f.config.data.reset_positions or any(one.get("position_encoding") == "learned" for one in fields):
        return None
    return "true, and no mixer has position_encoding learned", "set it to false"


def _not_a_set(domains: list[str] | None) -> Broken:
    if domains is None:
        return None
    if not domains:
        return "[] names no domain", "name one or more, or leave it out: every domain of the data"
    twice = sorted({name for name in domains if domains.count(name) > 1})
    if twice:
        return f"{', '.join(twice)} is named twice", "name each domain once"
    return None


# --- training --------------------------------------------------------------------------------------------------------


@rule("training.global_batch_size")
def batch_divides_by_replicas(f: Facts) -> Broken:
    """Every data-parallel rank makes the same number of whole micro-batches."""
    t, replicas = f.config.training, f.layout.data_parallel_size
    samples = t.micro_batch_size * replicas
    by = f"micro_batch_size {t.micro_batch_size} * data-parallel size {replicas} ="
    mend = f"give a multiple of {samples}, or another micro_batch_size"
    return _does_not_divide("global_batch_size", t.global_batch_size, by, samples, mend)


@rule("training.global_batch_size")
def interleaving_needs_whole_rounds(f: Facts) -> Broken:
    """The interleaved schedule hands micro-batches round the stages in groups of the pipeline's size."""
    p, t = f.config.parallel, f.config.training
    if p.virtual_pipeline == 1 or f.layout.num_micro_batches % p.pipeline == 0:
        return None
    samples = t.micro_batch_size * f.layout.data_parallel_size * p.pipeline
    return (
        f"{t.global_batch_size} makes {f.layout.num_micro_batches} micro-batches, which do not divide by "
        f"parallel.pipeline {p.pipeline}, and virtual_pipeline is {p.virtual_pipeline}",
        f"give a multiple of {samples}, or set parallel.virtual_pipeline=1",
    )


@rule("training.evaluate_suites_every")
def suites_have_a_rhythm(f: Facts) -> Broken:
    """Neither says anything without the other."""
    t = f.config.training
    if bool(t.evaluate_suites) == bool(t.evaluate_suites_every):
        return None
    if t.evaluate_suites:
        return f"0, with training.evaluate_suites {', '.join(t.evaluate_suites)}", "give the steps between them"
    return f"{t.evaluate_suites_every}, without training.evaluate_suites", "name them, e.g. [retrieval]"


@rule("training.evaluate_suites")
def suites_reach_the_output_layer(f: Facts) -> Broken:
    """They use its weight by itself; DeepSpeed's engine stands around the model, and ZeRO-3 has no weight whole."""
    t, sharding = f.config.training, f.config.optimizer.sharding
    if not t.evaluate_suites or sharding not in ("zero2", "zero3"):
        return None
    mend = "leave it out and run `selectron evaluate` on the checkpoints, or choose another sharding"
    return f"{', '.join(t.evaluate_suites)}, with optimizer.sharding {sharding}", mend


@rule("optimizer.min_lr")
def rate_falls(f: Facts) -> Broken:
    """The schedule goes down from lr to min_lr."""
    o = f.config.optimizer
    if o.min_lr <= o.lr:
        return None
    return f"{o.min_lr:g} is above optimizer.lr {o.lr:g}", f"give at most {o.lr:g}"


@rule("optimizer.decay_steps")
def decay_steps_belong_to_wsd(f: Facts) -> Broken:
    """Only the warm-up-stable-decay schedule has a decay of its own length, and it needs one."""
    o = f.config.optimizer
    if o.schedule == "wsd" and o.decay_steps == 0:
        return "0, with optimizer.schedule wsd", "give the number of last steps in which the rate falls"
    if o.schedule != "wsd" and o.decay_steps > 0:
        return f"{o.decay_steps}, with optimizer.schedule {o.schedule}", "set it to 0, or optimizer.schedule=wsd"
    return None


@rule("optimizer.warmup_steps")
def schedule_fits_the_run(f: Facts) -> Broken:
    """The warm-up ends before the run does, and the decay begins after it."""
    o, steps = f.config.optimizer, f.config.training.steps
    # Megatron's scheduler asserts that the warm-up is shorter than the run.
    if o.warmup_steps >= steps:
        return f"{o.warmup_steps} is not less than training.steps {steps}", f"give at most {steps - 1}, or more steps"
    if o.warmup_steps + o.decay_steps > steps:
        return (
            f"warm-up {o.warmup_steps} + decay_steps {o.decay_steps} is more than training.steps {steps}",
            "shorten one of them, or give more steps",
        )
    return None


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


@rule("optimizer.sharding")
def sharded_gradients_need_one_stage(f: Facts) -> Broken:
    """ZeRO-2 and 3 reduce gradients in each backward pass; a pipeline's backward passes accumulate them over many."""
    sharding, stages = f.config.optimizer.sharding, f.config.parallel.pipeline
    if stages == 1 or STAGES.get(sharding, 1) == 1:
        return None
    problem = f"{sharding} shares gradients out as they come, and parallel.pipeline {stages} must accumulate them"
    return problem, "set parallel.pipeline=1, or optimizer.sharding=zero1"


def _needs_deepspeed(field: str, f: Facts, *, stages: tuple[str, ...]) -> Broken:
    value, sharding = getattr(f.config.optimizer, field), f.config.optimizer.sharding
    if value in (None, "none") or sharding in stages:
        return None
    return f"{value}, with optimizer.sharding {sharding}", f"set optimizer.sharding={stages[0]}, or leave it out"


@rule("optimizer.offload")
def offloading_is_deepspeeds(f: Facts) -> Broken:
    """Megatron's optimizers of this project stay on the GPU."""
    return _needs_deepspeed("offload", f, stages=tuple(STAGES))


@rule("optimizer.offload_parameters")
def offloaded_parameters_are_shared_out(f: Facts) -> Broken:
    """Only ZeRO-3 fetches parameters when they are used."""
    return _needs_deepspeed("offload_parameters", f, stages=("zero3",))


@rule("optimizer.deepspeed")
def configuration_of_deepspeed_is_for_deepspeed(f: Facts) -> Broken:
    """Nobody else reads it."""
    return _needs_deepspeed("deepspeed", f, stages=tuple(STAGES))


@rule("optimizer.deepspeed")
def configuration_of_deepspeed_agrees(f: Facts) -> Broken:
    """What the run says and what the file says must be the same; the error names the file's field."""
    if f.config.optimizer.sharding in STAGES:
        deepspeed_config(f.config.optimizer, f.config.training, f.layout.num_micro_batches)
    return None


# --- where it runs ---------------------------------------------------------------------------------------------------


@rule("run.backend")
def transformer_engine_needs_a_gpu(f: Facts) -> Broken:
    """Transformer Engine has no CPU path."""
    r = f.config.run
    if r.backend != "transformer_engine" or r.device != "cpu":
        return None
    return "transformer_engine, with run.device cpu", "set run.backend=local, or run.device=cuda"
