"""Rules for the data section."""

from __future__ import annotations

from megatron_ext.config.rules.rule import Facts, Rules, Violation

RULES = Rules()
rule = RULES.on


@rule("data.cache_dir")
def remote_data_needs_cache(f: Facts) -> Violation:
    """Samples are read in random order. Over a network each would be a request of a few kilobytes."""
    data = f.config.data
    if ("://" in data.path) == (data.cache_dir is not None):
        return None
    if data.cache_dir is None:
        return f"null, with data.path {data.path}", "give a folder on a local disk"
    return f"{data.cache_dir}, with data.path {data.path} on this machine", "remove it"


@rule("data.cache_gib")
def cache_limit_needs_cache(f: Facts) -> Violation:
    """The limit applies to data.cache_dir only."""
    data = f.config.data
    if data.cache_gib is None or data.cache_dir is not None:
        return None
    return f"{data.cache_gib:g}, but data.cache_dir is not set", "remove it"


@rule("data.train_domains")
def train_domains_are_distinct(f: Facts) -> Violation:
    """An empty list leaves nothing to train on. A repeated name is a mistake, because it would not count twice."""
    return _problem_of_domains(f.config.data.train_domains)


@rule("data.test_domains")
def test_domains_are_distinct(f: Facts) -> Violation:
    """An empty list leaves nothing to test on. To disable evaluation set training.evaluate_every=0."""
    return _problem_of_domains(f.config.data.test_domains)


@rule("data.weights")
def some_weight_is_positive(f: Facts) -> Violation:
    """Without a positive weight there is nothing to read."""
    weights = f.config.data.weights
    if weights is None or any(weights.values()):
        return None
    return f"{weights or 'no domain'} has no weight above 0", "give one, or remove it to sample in proportion to tokens"


@rule("data.reset_positions")
def reset_positions_needs_learned_positions(f: Facts) -> Violation:
    """Only learned position tables read position ids. Rotary and ALiBi encodings depend on distances only."""
    fields = [f.config.mixers.get(name, {}) for name in f.layers]
    if not f.config.data.reset_positions or any(entry.get("position_encoding") == "learned" for entry in fields):
        return None
    return "true, but no mixer has position_encoding learned", "set it to false"


@rule("data.reset_attention")
def layers_support_document_masking(f: Facts) -> Violation:
    """One layer that mixes documents defeats the others. Token shifts ignore document boundaries."""
    shifting = [
        f"{name} in layer {i}"
        for i, name in enumerate(f.layers, 1)
        if not f.mixers[name].traits.supports_document_masking
    ]
    if f.config.model.block == "rwkv7":
        shifting.append("model.block rwkv7")
    if not f.config.data.reset_attention or not shifting:
        return None
    return (
        f"true, but {shifting[0]} shifts tokens across documents",
        "choose another mixer or block, or set it to false",
    )


@rule("data.reset_attention")
def reset_attention_forbids_context_parallel(f: Facts) -> Violation:
    """Document boundaries refer to the whole sample, and mixers expect whole documents on one rank."""
    context = f.config.parallel.context
    if not f.config.data.reset_attention or context == 1:
        return None
    return f"true, with parallel.context {context}", "set parallel.context=1, or set it to false"


def _problem_of_domains(domains: list[str] | None) -> Violation:
    if domains is None:
        return None
    if not domains:
        return "[] names no domain", "give one or more, or remove it to use every domain of the data"
    twice = sorted({name for name in domains if domains.count(name) > 1})
    if twice:
        return f"{', '.join(twice)} is given twice", "give each domain once"
    return None
