"""Rules for the model and its parallel layout."""

from __future__ import annotations

from megatron_ext.config.layout import model_parallel_size, sequence_parallel
from megatron_ext.config.rules.rule import Facts, Rules, Violation, does_not_divide
from megatron_ext.config.schema import ModelConfig
from megatron_ext.config.traits import MixerTraits, fetched_chunk_size

RULES = Rules()
rule = RULES.on


@rule("parallel")
def world_size_divides_by_replica(f: Facts) -> Violation:
    """Every process belongs to one whole replica of the model."""
    p, world = f.config.parallel, f.layout.world_size
    replica = model_parallel_size(p)
    if world % replica == 0:
        return None
    fitting = -(-world // replica) * replica
    return (
        f"tensor {p.tensor} * pipeline {p.pipeline} * context {p.context} = {replica} processes per replica, "
        f"which does not divide the world size {world}",
        f"start a multiple of {replica} (--processes {fitting}), or lower one of the sizes",
    )


@rule("parallel.sequence")
def sequence_parallel_needs_tensor_parallel(f: Facts) -> Violation:
    """Sequence parallelism shards the activations that tensor parallelism replicates."""
    p = f.config.parallel
    if p.sequence is not True or p.tensor > 1:
        return None
    return "true, with parallel.tensor 1", "set parallel.tensor above 1, or parallel.sequence=auto"


@rule("parallel.virtual_pipeline")
def interleaving_needs_stages(f: Facts) -> Violation:
    """Model chunks are interleaved over pipeline stages."""
    p = f.config.parallel
    if p.virtual_pipeline == 1 or p.pipeline > 1:
        return None
    return f"{p.virtual_pipeline}, with parallel.pipeline 1", "set parallel.pipeline above 1, or virtual_pipeline to 1"


@rule("parallel.batch_p2p_comm")
def two_interleaved_stages_forbid_batched_p2p(f: Facts) -> Violation:
    """Megatron's batched exchange with two interleaved stages silently mixes up the model chunks."""
    p = f.config.parallel
    if not p.batch_p2p_comm or p.virtual_pipeline == 1 or p.pipeline != 2:
        return None
    problem = f"true, with parallel.pipeline 2 and virtual_pipeline {p.virtual_pipeline}, gives wrong gradients"
    return problem, "remove it, or set virtual_pipeline to 1"


@rule("parallel.context_transport")
def copy_engine_needs_gpu(f: Facts) -> Violation:
    """A CPU has no copy engines. Without context parallelism nothing is exchanged."""
    p = f.config.parallel
    if p.context_transport != "copy_engine" or p.context == 1 or f.config.run.device != "cpu":
        return None
    return "copy_engine, with run.device cpu", "choose nccl (gloo on CPU), or set run.device=cuda"


# --- model -----------------------------------------------------------------------------------------------------------


@rule("model.num_query_groups")
def heads_divide_by_query_groups(f: Facts) -> Violation:
    """Every key/value head serves the same number of query heads."""
    m = f.config.model
    hint = "give a divisor of model.num_attention_heads"
    return does_not_divide(
        "model.num_attention_heads", m.num_attention_heads, "num_query_groups", m.num_query_groups or 1, hint
    )


@rule("model.num_attention_heads")
def heads_divide_by_tensor(f: Facts) -> Violation:
    """Each tensor-parallel rank holds whole heads."""
    heads, tensor = f.config.model.num_attention_heads, f.config.parallel.tensor
    return does_not_divide("num_attention_heads", heads, "parallel.tensor", tensor, "change one of them")


@rule("model.num_query_groups")
def query_groups_divide_by_tensor(f: Facts) -> Violation:
    """Each tensor-parallel rank holds whole key/value heads."""
    groups, tensor = f.config.model.num_query_groups or 1, f.config.parallel.tensor
    return does_not_divide("num_query_groups", groups, "parallel.tensor", tensor, "change one of them")


@rule("model.ffn_hidden_size")
def mixer_block_has_no_ffn(f: Facts) -> Violation:
    """The width of a feed-forward that does not exist would have no effect."""
    m = f.config.model
    if m.block != "mixer" or m.ffn_hidden_size is None:
        return None
    return f"{m.ffn_hidden_size}, with model.block mixer", "remove it, or set model.block=transformer"


@rule("model.ffn_hidden_size")
def ffn_divides_by_tensor(f: Facts) -> Violation:
    """The feed-forward columns are split evenly over the tensor-parallel ranks."""
    width, tensor = f.config.model.ffn_hidden_size or 0, f.config.parallel.tensor
    return does_not_divide("ffn_hidden_size", width, "parallel.tensor", tensor, f"give a multiple of {tensor}")


@rule("model.vocab_size_multiple")
def vocabulary_divides_by_tensor(f: Facts) -> Violation:
    """The vocabulary is sharded evenly, and its padding must not depend on the layout."""
    multiple, tensor = f.config.model.vocab_size_multiple, f.config.parallel.tensor
    return does_not_divide("vocab_size_multiple", multiple, "parallel.tensor", tensor, f"give a multiple of {tensor}")


@rule("model.head_dim")
def head_dim_is_even(f: Facts) -> Violation:
    """Rotary position encoding rotates pairs of coordinates."""
    head_dim = f.config.model.head_dim or 2
    if head_dim % 2 == 0:
        return None
    return f"{head_dim} is odd", "give an even head_dim, or another num_attention_heads"


@rule("model.max_position_embeddings")
def positions_cover_the_sequence(f: Facts) -> Violation:
    """A learned position table has a row for every token of a sample."""
    positions, seq_length = f.config.model.max_position_embeddings or 0, f.config.data.seq_length
    if positions >= seq_length:
        return None
    return f"{positions} is less than data.seq_length {seq_length}", f"give at least {seq_length}, or remove it"


@rule("model.pattern")
def layers_divide_by_stages(f: Facts) -> Violation:
    """Megatron assigns the same number of layers to every stage and every model chunk."""
    p = f.config.parallel
    chunks = p.pipeline * p.virtual_pipeline
    by = f"parallel.pipeline {p.pipeline} * virtual_pipeline {p.virtual_pipeline} ="
    return does_not_divide("number of layers", len(f.layers), by, chunks, f"give a multiple of {chunks} layers")


# --- sequence --------------------------------------------------------------------------------------------------------


@rule("data.seq_length")
def sequence_divides_by_ranks(f: Facts) -> Violation:
    """Context parallelism splits the sequence evenly, and sequence parallelism splits each part again."""
    p, seq_length = f.config.parallel, f.config.data.seq_length
    if sequence_parallel(f.config):
        by, ranks = f"parallel.tensor {p.tensor} * context {p.context} =", p.tensor * p.context
        more = ", or set parallel.sequence=false" if seq_length % p.context == 0 else ""
    else:
        by, ranks, more = "parallel.context", p.context, ""
    return does_not_divide("seq_length", seq_length, by, ranks, f"give a multiple of {ranks}{more}")


@rule("parallel.context")
def heads_divide_by_context(f: Facts) -> Violation:
    """A mixer that neither gathers keys and values nor sends states uses an all-to-all, which needs whole heads."""
    p = f.config.parallel
    for name in dict.fromkeys(f.layers):
        traits = f.mixers[name].traits
        field, units = _heads(f.config.model, traits)
        local, passes_states = units // p.tensor, traits.supports_state_passing and p.context_exchange != "heads"
        if local % p.context == 0 or traits.supports_kv_gather or passes_states:
            continue
        more = ", or set parallel.context_exchange=auto" if traits.supports_state_passing else ""
        return (
            f"{name} splits its heads, and {field} {units} / tensor {p.tensor} = {local} heads "
            f"are not divisible by context {p.context}",
            f"choose a context that divides {local}, or change model.{field}{more}",
        )
    return None


@rule("parallel.context_exchange_rounds")
def heads_divide_by_rounds(f: Facts) -> Violation:
    """Every round exchanges the same number of a rank's heads."""
    p = f.config.parallel
    rounds = p.context_exchange_rounds
    if p.context == 1:
        return None
    for name in dict.fromkeys(f.layers):
        traits = f.mixers[name].traits
        field, units = _heads(f.config.model, traits)
        own = "states" if traits.supports_state_passing else "chunks" if traits.chunk_field else None
        local = units // p.tensor
        if local % p.context or p.context_exchange == own:
            continue  # this mixer exchanges no heads
        mixed = local // p.context
        if mixed % rounds:
            return (
                f"{rounds}, and {field} {units} / tensor {p.tensor} / context {p.context} = {mixed} heads of {name} "
                "are not divisible by that",
                f"choose one that divides {mixed}",
            )
    return None


def _heads(model: ModelConfig, traits: MixerTraits) -> tuple[str, int]:
    """Return the field with the number of heads, or query groups, that ranks exchange, and that number."""
    field = "num_query_groups" if traits.head_groups_are_query_groups else "num_attention_heads"
    return field, getattr(model, field) or model.num_attention_heads


@rule("parallel.context_exchange")
def context_shard_divides_by_chunk(f: Facts) -> Violation:
    """A chosen chunk is fetched from the one rank that holds it."""
    p, seq_length = f.config.parallel, f.config.data.seq_length
    if p.context == 1 or p.context_exchange != "chunks":
        return None
    for name in dict.fromkeys(f.layers):
        mixer = f.mixers[name]
        size = fetched_chunk_size(mixer, f.config.mixers.get(name, {}))
        if size is not None and seq_length // p.context % size:
            return (
                f"chunks, and data.seq_length {seq_length} / context {p.context} = {seq_length // p.context} is not "
                f"divisible by mixers.{name}.{mixer.traits.chunk_field} {size}",
                f"give a seq_length that is a multiple of {p.context * size}, or set parallel.context_exchange=auto",
            )
    return None
