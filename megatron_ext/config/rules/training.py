"""Rules for training, the optimizer and the device."""

from __future__ import annotations

from megatron_ext.config.deepspeed import STAGES, deepspeed_config
from megatron_ext.config.effects import EFFECTS, Effect, effect_of
from megatron_ext.config.rules.rule import Facts, Rules, Violation, does_not_divide
from megatron_ext.config.schema import FP8_TILE
from megatron_ext.config.suggest import suggest
from megatron_ext.config.validate import field_names

RULES = Rules()
rule = RULES.on

_TRIAL = " (selectron train --trial scales the schedule for a short run)"


@rule("training.global_batch_size")
def batch_divides_by_replicas(f: Facts) -> Violation:
    """Every data-parallel rank processes the same number of whole micro-batches."""
    t, replicas = f.config.training, f.layout.data_parallel_size
    samples = t.micro_batch_size * replicas
    by = f"micro_batch_size {t.micro_batch_size} * data-parallel size {replicas} ="
    hint = f"give a multiple of {samples}, or another micro_batch_size"
    return does_not_divide("global_batch_size", t.global_batch_size, by, samples, hint)


@rule("training.global_batch_size")
def interleaving_needs_whole_rounds(f: Facts) -> Violation:
    """The interleaved schedule processes micro-batches in groups of the pipeline size."""
    p, t = f.config.parallel, f.config.training
    if p.virtual_pipeline == 1 or f.layout.num_micro_batches % p.pipeline == 0:
        return None
    samples = t.micro_batch_size * f.layout.data_parallel_size * p.pipeline
    return (
        f"{t.global_batch_size} makes {f.layout.num_micro_batches} micro-batches, which are not divisible by "
        f"parallel.pipeline {p.pipeline}, and virtual_pipeline is {p.virtual_pipeline}",
        f"give a multiple of {samples}, or set parallel.virtual_pipeline=1",
    )


@rule("training.recompute")
def mlp_recompute_needs_ffn(f: Facts) -> Violation:
    """A layer with block mixer has no feed-forward to recompute."""
    if f.config.training.recompute != "mlp" or f.config.model.block != "mixer":
        return None
    return "mlp, but model.block mixer has no feed-forward", "use none or full"


@rule("training.fp8")
def fp8_needs_transformer_engine(f: Facts) -> Violation:
    """FP8 needs Transformer Engine on a GPU."""
    fp8, run = f.config.training.fp8, f.config.run
    if fp8 == "none":
        return None
    if run.device == "cpu":
        return f"{fp8}, with run.device cpu", "set training.fp8=none, or run.device=cuda"
    if run.backend == "local":
        return f"{fp8}, with run.backend local", "set training.fp8=none, or run.backend=transformer_engine"
    return None


@rule("training.fp8")
def fp8_needs_bf16(f: Facts) -> Violation:
    """Everything that is not FP8 is bf16, which Transformer Engine quantizes from."""
    t = f.config.training
    if t.fp8 == "none" or t.precision == "bf16":
        return None
    return f"{t.fp8}, with training.precision {t.precision}", "set training.fp8=none, or training.precision=bf16"


@rule("training.fp8")
def fp8_forbids_deepspeed(f: Facts) -> Violation:
    """DeepSpeed replaces the storage of parameters, and Transformer Engine's FP8 copies are not updated."""
    fp8, sharding = f.config.training.fp8, f.config.optimizer.sharding
    if fp8 == "none" or sharding not in STAGES:
        return None
    return f"{fp8}, with optimizer.sharding {sharding}", "set training.fp8=none, or optimizer.sharding=megatron"


@rule("training.micro_batch_size")
def fp8_needs_whole_tiles(f: Facts) -> Violation:
    """FP8 products need a multiple of 16 rows: the tokens of a micro-batch on a rank."""
    t, p, length = f.config.training, f.config.parallel, f.config.data.seq_length
    tokens = t.micro_batch_size * length // p.context
    if t.fp8 == "none" or tokens % FP8_TILE == 0:
        return None
    return (
        f"{t.micro_batch_size} * data.seq_length {length} / parallel.context {p.context} = {tokens} tokens, "
        f"with training.fp8 {t.fp8}",
        f"give a multiple of {FP8_TILE} tokens, or set training.fp8=none",
    )


@rule("training.evaluate_suites_every")
def suites_need_interval(f: Facts) -> Violation:
    """The suites and their interval have no effect without each other."""
    t = f.config.training
    if bool(t.evaluate_suites) == bool(t.evaluate_suites_every):
        return None
    if t.evaluate_suites:
        return f"0, with training.evaluate_suites {', '.join(t.evaluate_suites)}", "give the steps between them"
    return f"{t.evaluate_suites_every}, but training.evaluate_suites is not set", "set it, e.g. to [retrieval]"


@rule("training.checkpoint_every")
def roll_back_needs_checkpoints(f: Facts) -> Violation:
    """Without checkpoints there is nothing to roll back to."""
    r = f.config.resilience
    if f.config.training.checkpoint_every or "roll_back" not in (r.on_nonfinite, r.on_spike):
        return None
    name = "on_nonfinite" if r.on_nonfinite == "roll_back" else "on_spike"
    return f"0, with resilience.{name} roll_back", "give the steps between checkpoints"


@rule("optimizer.min_lr")
def min_lr_is_at_most_lr(f: Facts) -> Violation:
    """The schedule decays from lr to min_lr."""
    o = f.config.optimizer
    if o.min_lr <= o.lr:
        return None
    return f"{o.min_lr:g} is above optimizer.lr {o.lr:g}", f"give at most {o.lr:g}"


@rule("optimizer.decay_steps")
def decay_steps_need_wsd(f: Facts) -> Violation:
    """Only the warm-up-stable-decay schedule has a separate decay length, and requires it."""
    o = f.config.optimizer
    if o.schedule == "wsd" and o.decay_steps == 0:
        return "0, with optimizer.schedule wsd", "give the number of final steps in which the learning rate decays"
    if o.schedule != "wsd" and o.decay_steps > 0:
        return f"{o.decay_steps}, with optimizer.schedule {o.schedule}", "set it to 0, or optimizer.schedule=wsd"
    return None


@rule("optimizer.warmup_steps")
def schedule_fits_the_run(f: Facts) -> Violation:
    """The warm-up ends before the run does, and the decay starts after it."""
    o, steps = f.config.optimizer, f.config.training.steps
    # Megatron's scheduler asserts that the warm-up is shorter than the run.
    if o.warmup_steps >= steps:
        return (
            f"{o.warmup_steps} is not less than training.steps {steps}",
            f"give at most {steps - 1}, or more steps{_TRIAL}",
        )
    if o.warmup_steps + o.decay_steps > steps:
        return (
            f"warm-up {o.warmup_steps} + decay_steps {o.decay_steps} is more than training.steps {steps}",
            f"shorten one of them, or give more steps{_TRIAL}",
        )
    return None


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


@rule("optimizer.sharding")
def gradient_sharding_forbids_pipeline(f: Facts) -> Violation:
    """ZeRO-2 and 3 reduce gradients in each backward pass. A pipeline accumulates them over many."""
    sharding, stages = f.config.optimizer.sharding, f.config.parallel.pipeline
    if stages == 1 or STAGES.get(sharding, 1) == 1:
        return None
    problem = f"{sharding} shards gradients at once, but parallel.pipeline {stages} must accumulate them"
    return problem, "set parallel.pipeline=1, or optimizer.sharding=zero1"


def _needs_deepspeed(field: str, f: Facts, *, stages: tuple[str, ...]) -> Violation:
    value, sharding = getattr(f.config.optimizer, field), f.config.optimizer.sharding
    if value in (None, "none") or sharding in stages:
        return None
    return f"{value}, with optimizer.sharding {sharding}", f"set optimizer.sharding={stages[0]}, or remove it"


@rule("optimizer.offload")
def offload_needs_deepspeed(f: Facts) -> Violation:
    """Only DeepSpeed offloads. The optimizers built on Megatron keep their state on the GPU."""
    return _needs_deepspeed("offload", f, stages=tuple(STAGES))


@rule("optimizer.offload_parameters")
def parameter_offload_needs_zero3(f: Facts) -> Violation:
    """Only ZeRO-3 fetches parameters when they are used."""
    return _needs_deepspeed("offload_parameters", f, stages=("zero3",))


@rule("optimizer.deepspeed")
def deepspeed_file_needs_deepspeed(f: Facts) -> Violation:
    """Only DeepSpeed reads this file."""
    return _needs_deepspeed("deepspeed", f, stages=tuple(STAGES))


@rule("optimizer.deepspeed")
def deepspeed_file_matches_run(f: Facts) -> Violation:
    """The run and the file must not contradict each other. The error names the file's field."""
    if f.config.optimizer.sharding in STAGES:
        deepspeed_config(f.config.optimizer, f.config.training, f.layout.num_micro_batches)
    return None


# --- continuing from a checkpoint ------------------------------------------------------------------------------------


@rule("run.allow_changed")
def allowed_changes_are_possible(f: Facts) -> Violation:
    """An unknown name would allow nothing, and the checkpoint of another model cannot be loaded."""
    for name in f.config.run.allow_changed:
        mixer, _, field = name.removeprefix("mixers.").partition(".")
        if name.startswith("mixers."):
            is_field = mixer in f.mixers and field in field_names(f.mixers[mixer].config_type)
        else:
            is_field = name in EFFECTS
        if not is_field:
            changing = [known for known, effect in EFFECTS.items() if effect in (Effect.PAST, Effect.SCHEDULE)]
            return f"{name} is not a field", suggest(name, changing)
        if effect_of(name) is Effect.MODEL:
            kind = name.partition(".")[0]
            hint = f"start a new run with the other {kind}"
            return f"{name} changes the {kind}, and the checkpoint does not have its tensors", hint
        if effect_of(name) not in (Effect.PAST, Effect.SCHEDULE):
            return f"{name} may be changed without being listed", "remove it"
    return None


# --- device ----- ---------------------------------------------------------------------------------------------------


@rule("run.backend")
def transformer_engine_needs_gpu(f: Facts) -> Violation:
    """Transformer Engine has no CPU path."""
    r = f.config.run
    if r.backend != "transformer_engine" or r.device != "cpu":
        return None
    return "transformer_engine, with run.device cpu", "set run.backend=local, or run.device=cuda"
