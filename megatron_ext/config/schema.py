"""The configuration of a run: one tree of typed, frozen dataclasses.

Types and ranges of single fields are declared here; what cannot go together stands in `rules.py`; reading and writing
YAML in `load.py`. A field left at None is derived (see `derive.py`); a saved configuration is written derived, whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from megatron_ext.config.pattern import on_one_line

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Unknown keys, values of another type, infinities and NaN are refused, never converted."""

FP8_TILE = 16
"""Rows and columns of matrices in 8 bits come in multiples of it."""

TransportName = Literal["nccl", "copy_engine"]

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise PydanticCustomError("power_of_two", "not a power of two")
    return value


PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
"""torch's names of the types that a run may train in, by those of `training.precision`."""

PowerOfTwo = Annotated[PositiveInt, AfterValidator(_power_of_two)]


def _true_false_or_auto(value: object) -> object:
    if isinstance(value, bool) or value == "auto":
        return value
    raise PydanticCustomError("switch", "not true, false or auto")


Switch = Annotated[bool | Literal["auto"], BeforeValidator(_true_false_or_auto)]
"""A switch that may be left to the run; one validator, as a union would name each of its branches in an error."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The block and what mixes the sequence in each layer.

    Attributes:
        pattern: a mixer's name for every layer, e.g. `"attention*12"`, `"(top1_chunk*3,attention)*4"`.
        block: what stands around the mixers: the Transformer++ (feed-forward SwiGLU), RWKV-7's block (token shift
            before the mixer and the feed-forward, which is two matrices with a squared ReLU between), or nothing but a
            norm and the residual: a layer is the mixer, as in Mamba's own models.
        normalization: the block's norms: RMSNorm, or LayerNorm with a bias.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads of every mixer.
        num_query_groups: key/value heads (GQA); None: as many as query heads.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        ffn_hidden_size: width inside the feed-forward; None: 8/3 of hidden_size, rounded up to a multiple of 64, or in
            RWKV-7's block 4 * hidden_size; stays None where a layer is the mixer.
        max_position_embeddings: size of a learned position table; None: data.seq_length.
        tie_embeddings: output layer shares the input embedding's weight.
        rotary_base: base of the rotary frequencies.
        norm_epsilon: epsilon of every norm; RWKV's norm of a head's output has head_dim times that.
        init_std: standard deviation of normal initial weights; output projections divide it by the square root of
            their number: two a layer, or one where a layer is the mixer.
        vocab_size_multiple: the vocabulary is padded up to a multiple of this, whatever the layout.
    """

    pattern: Annotated[str, AfterValidator(on_one_line)] = "attention*12"
    block: Literal["transformer", "rwkv7", "mixer"] = "transformer"
    normalization: Literal["rms_norm", "layer_norm"] = "rms_norm"
    hidden_size: PositiveInt = 768
    num_attention_heads: PositiveInt = 12
    num_query_groups: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    ffn_hidden_size: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    tie_embeddings: bool = False
    rotary_base: PositiveFloat = 10000.0
    norm_epsilon: PositiveFloat = 1e-5
    init_std: PositiveFloat = 0.02
    vocab_size_multiple: PositiveInt = 128


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """How the processes are arranged. The data-parallel size is what is left of the world.

    Attributes:
        tensor: tensor-parallel size (TP): heads and feed-forward columns split.
        sequence: sequence parallelism (SP): activations between the TP regions split along the sequence. auto: on with
            TP above 1 where data.seq_length divides by TP * CP, else off (`layout.sequence_parallel`); it stays `auto`
            in a saved configuration, so that the run can go on under another TP.
        pipeline: pipeline stages (PP).
        virtual_pipeline: model chunks a stage holds; above 1 the schedule is interleaved 1F1B.
        context: context-parallel size (CP): the sequence split in contiguous parts.
        context_exchange: what mixers exchange under CP where they have a choice. heads: whole heads for parts of the
            sequence. states: those with a state hand it on from part to part. chunks: those that choose chunks fetch
            the chosen ones; parts must be whole chunks. States and chunks need no heads that divide. auto, and what a
            mixer does that has no exchange of that name: whichever is fewer bytes.
        context_exchange_rounds: messages in which heads are exchanged: those of one round travel while another is
            computed. A round is of some of a micro-batch's samples as far as these divide, whose messages projections
            hide, too; else of some heads, of which only one round's are waited for. The heads that a rank mixes must
            divide by it; those of `mamba`, which depend on one another, are all of one round.
        context_transport: how exchanged heads travel. nccl: by NCCL, between any GPUs; on CPUs it is gloo. copy_engine:
            by the copy engines of GPUs of one node, which leave the multiprocessors to what is computed meanwhile.
    """

    tensor: PositiveInt = 1
    sequence: Switch = "auto"
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    context: PositiveInt = 1
    context_exchange: Literal["auto", "heads", "states", "chunks"] = "auto"
    context_exchange_rounds: PositiveInt = 1
    context_transport: TransportName = "nccl"
    batch_p2p_comm: bool | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Prepared data (see `selectron prepare`).

    Attributes:
        path: folder with manifest.json and the shards; or its address as fsspec takes it, s3://bucket/folder.
        cache_dir: local folder for copies of shards that lie at an address: each is copied when it is first opened, by
            one process of a machine, and its sha256 compared with the manifest's; `verify` then means that all have
            the right size at the address. Validation and test shards are copied before training.
        cache_gib: GiB of training text kept there, at most, and a shard a process; None: all of it. As samples come in
            any order, a run that does not find room for all its shards copies whole ones again for a sample each, and
            warns.
        tokenizer: a tokenizer.json that must be the one the data was made with; None: the one kept beside the manifest.
        train_domains: domains to train on; None: every domain of the manifest that has a train split.
        test_domains: domains to test on; None: every domain of the manifest that has a test split, but none that was
            prepared for training and is left out of train_domains. Domains without training text are tested as `test`,
            out of domain; those of train_domains as `test_in_domain`. Text of train_domains that was held out for
            validation is always evaluated on, as `validation`.
        weights: part of the samples that each training domain has, in any unit; None: in proportion to its tokens.
            After any number of samples a domain has had its part of them to within one sample; a domain that has been
            read through begins again.
        seq_length: tokens a sample, whole, before context parallelism splits it.
        verify: what is checked of the shards before training. sha256: that of every file, once a run: one that goes on
            reads those again whose size, inode or times are not as they were then (verified_shards.json in its
            folder), or that failed while it read them (failed_shards in its folder). sha256_always: reads all of them
            at every start, which finds a disk that has lost bits meanwhile before the run comes to them. size: their
            size alone, and those that failed whole.
        on_damaged: what becomes of a run for which that check finds a shard of training text missing or damaged. stop:
            it does not begin. skip: it does without the shard, with a warning, a line in skipped_shards.jsonl and the
            order of all other samples as it was; a sample of the shard reads another in its place. Text to evaluate on
            is never skipped. A shard that fails later than that check stops the run by its name once. The next start
            reads it whole, on every machine, or copies it from its address again: `--resume` with skip goes on without
            it, unless it is whole again.
        document_boundaries: batches say where the documents of a packed sample begin (`Batch.cu_seqlens`), for code
            that reads them; the model does so with `reset_attention`, and mixes across documents without.
        reset_attention: a token attends to, and takes state from, its own document alone, in training as in the losses
            by domain: each document of a sample is computed as if it were alone, from position 0 on, and its
            first token, which nothing of it precedes, counts in no loss.
        reset_positions: positions begin at 0 with every document of a sample, for a learned position table.
    """

    path: str
    cache_dir: str | None = None
    cache_gib: PositiveFloat | None = None
    tokenizer: str | None = None
    train_domains: list[str] | None = None
    test_domains: list[str] | None = None
    weights: dict[str, NonNegativeFloat] | None = None
    seq_length: PositiveInt = 2048
    verify: Literal["sha256", "sha256_always", "size"] = "sha256"
    on_damaged: Literal["stop", "skip"] = "stop"
    document_boundaries: bool = False
    reset_attention: bool = False
    reset_positions: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig:
    """Length, batch, precision and rhythm of the run.

    Attributes:
        steps: optimizer steps.
        global_batch_size: samples an optimizer step.
        micro_batch_size: samples a forward pass on one data-parallel rank.
        precision: parameters and activations; gradients are reduced and accumulated in fp32 either way.
        fp8: the matrix products of layers in 8 bits, by Transformer Engine on a GPU that has them; weights, what layers
            hand on, and the output layer stay in bf16. tensorwise: a scale a tensor, of the values at hand (E4M3
            forward, E5M2 backward); blockwise: a scale for 1 x 128 values, of weights 128 x 128 (E4M3).
        seed: of the initial weights and of the order of the samples.
        recompute: activations recomputed in the backward pass: none; mlp: those of the feed-forward and the norm before
            it, which are more than half of the memory and cost no mixer's work a second time; full: of whole layers.
        evaluate_every: steps between evaluations by domain; 0: never.
        evaluate_suites: tests between steps beside loss by domain: retrieval, fewshot. What they are told stands in the
            sections of their names.
        evaluate_suites_every: steps between them; they are run after the last step, too.
        evaluation_sequences: samples evaluated a domain, at most; 0: all.
        checkpoint_every: steps between checkpoints; 0: only when the run ends or is asked to stop.
        keep_checkpoints: newest checkpoints kept; 0: all.
        keep_every: checkpoints whose step is a multiple of this are kept besides, for ever; 0: none.
        async_checkpoints: training goes on while a checkpoint is written, at the price of memory for a copy of the
            state; without, it waits.
    """

    steps: PositiveInt = 1000
    global_batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt = 4
    precision: Literal["bf16", "fp32"] = "bf16"
    fp8: Literal["none", "tensorwise", "blockwise"] = "none"
    seed: NonNegativeInt = 1234
    recompute: Literal["none", "mlp", "full"] = "none"
    evaluate_every: NonNegativeInt = 0
    evaluate_suites: list[str] = Field(default_factory=list)
    evaluate_suites_every: NonNegativeInt = 0
    evaluation_sequences: NonNegativeInt = 0
    checkpoint_every: NonNegativeInt = 0
    keep_checkpoints: NonNegativeInt = 2
    keep_every: NonNegativeInt = 0
    async_checkpoints: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate at the end of the schedule.
        weight_decay: on matrices; vectors (norms, gates) have none.
        betas: Adam's two moments.
        epsilon: Adam's epsilon.
        clip_grad: largest global gradient norm; 0: no clipping.
        schedule: warm-up then cosine to min_lr; warm-up-stable-decay (linear decay at the end); warm-up then constant.
        warmup_steps: linear warm-up from 0.
        decay_steps: of `wsd`: the last steps, in which the rate falls to min_lr.
        sharding: what data-parallel ranks share out instead of each keeping it whole. none: nothing; megatron:
            optimizer state, by Megatron's distributed optimizer; zero1: the same, by DeepSpeed; zero2: gradients, too;
            zero3: parameters, too.
        offload: where DeepSpeed keeps optimizer state, and updates parameters: on the GPU (none) or the CPU.
        offload_parameters: where zero3 keeps parameters while they are not used.
        deepspeed: JSON file with more of DeepSpeed's own configuration, NVMe for example.
    """

    lr: PositiveFloat = 3e-4
    min_lr: NonNegativeFloat = 3e-5
    weight_decay: NonNegativeFloat = 0.1
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0.9, 0.95])
    epsilon: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt = 0
    sharding: Literal["none", "megatron", "zero1", "zero2", "zero3"] = "megatron"
    offload: Literal["none", "cpu"] = "none"
    offload_parameters: Literal["none", "cpu"] = "none"
    deepspeed: str | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResilienceConfig:
    """What becomes of steps that go wrong, and how a run shows that it is alive.

    A step's loss and gradient norm are judged before parameters are updated; decisions stand in decisions.jsonl.

    Attributes:
        retries: times that a step that went wrong is computed again, from the same samples, before anything else: what
            a machine got wrong once it mostly gets right then, and the run is as if nothing had been.
        on_nonfinite: what is done if the loss or the gradient is not finite still. stop: the run ends, with a
            checkpoint of the step before. skip: the step's samples are left out, parameters stay as they are.
            roll_back: the run goes on from its newest checkpoint, with the samples after those of this step.
        on_spike: the same if the loss or the gradient's norm is far above those of the steps before; ignore: nothing.
        spike_deviations: what far is, in standard deviations above the mean.
        spike_window: steps whose mean and deviation are taken; before there are as many, nothing is a spike.
        limit: most steps that may be skipped or rolled back in a run; the next one stops it.
        heartbeat_seconds: between two signs that each rank writes of how far it is, for `selectron status --ranks`; 0:
            it writes none.
        straggler_every: steps between comparisons of the ranks' speeds, each alone with a matrix product and with the
            reading of its samples; 0: never.
        straggler_factor: a rank is named that takes so many times as long as the middle one.
    """

    retries: NonNegativeInt = 1
    on_nonfinite: Literal["stop", "skip", "roll_back"] = "stop"
    on_spike: Literal["ignore", "stop", "skip", "roll_back"] = "ignore"
    spike_deviations: PositiveFloat = 6.0
    spike_window: Annotated[int, Field(ge=2)] = 128
    limit: NonNegativeInt = 10
    heartbeat_seconds: NonNegativeFloat = 10.0
    straggler_every: NonNegativeInt = 100
    straggler_factor: Annotated[float, Field(gt=1.0)] = 1.5


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSection:
    """Where the run is kept and on what it runs.

    Attributes:
        dir: folder of runs.
        name: folder of this run inside it.
        backend: Megatron's modules for norms and linears: its own (`local`) or Transformer Engine's; auto: Transformer
            Engine's where it is installed and a GPU is there.
        device: cuda, cpu, or auto: cuda where there is one.
        hang_timeout: seconds without a step, forward pass or checkpoint after which a rank ends itself, its stacks on
            standard error; the first step may compile for a minute. 0: never.
        branch_from: checkpoint of another run (`runs/trunk/checkpoints/step_400`) to begin from, with its optimizer's
            state, its place in the data and its records; None: begin from initial weights.
        allow_changed: fields that may differ from those of the checkpoint that a run goes on from, although the steps
            before were made with the other value, e.g. [optimizer.lr]; noted in decisions.jsonl.
        allow_other_data: go on from a checkpoint although the training text is another than before it; noted likewise.
    """

    dir: str = "runs"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    backend: Literal["auto", "local", "transformer_engine"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    hang_timeout: NonNegativeFloat = 1800.0
    branch_from: str | None = None
    allow_changed: list[str] = Field(default_factory=list)
    allow_other_data: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """Everything a run is made from. `mixers` holds, by mixer name, the fields of that mixer's own small config.

    `retrieval` and `fewshot` hold what `selectron evaluate` takes under the same names, for `training.evaluate_suites`.
    """

    data: DataConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    mixers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    resilience: ResilienceConfig = Field(default_factory=ResilienceConfig)
    run: RunSection = Field(default_factory=RunSection)
    retrieval: dict[str, Any] = Field(default_factory=dict)
    fewshot: dict[str, Any] = Field(default_factory=dict)


OF_SUITES = ("retrieval", "fewshot")
"""Sections whose fields are not the configuration's own: the suite reads them, see `training.suites`."""
