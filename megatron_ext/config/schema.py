"""Run configuration: one tree of typed, frozen dataclasses.

Types and ranges of single fields are declared here. Constraints between fields are in `rules/`, and reading and writing
YAML is in `load.py` and `save.py`. A field left at None is derived (see `derive.py`). A saved configuration contains
the derived values.
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
"""Refuse unknown keys, values of another type, infinities and NaN instead of converting them."""

FP8_TILE = 16
"""Dimensions of FP8 matrices must be multiples of this."""

TransportName = Literal["nccl", "copy_engine"]

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise PydanticCustomError("power_of_two", "not a power of two")
    return value


PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
"""torch dtype names of the training precisions, by the value of `training.precision`."""

PowerOfTwo = Annotated[PositiveInt, AfterValidator(_power_of_two)]


def _true_false_or_auto(value: object) -> object:
    if isinstance(value, bool) or value == "auto":
        return value
    raise PydanticCustomError("switch", "not true, false or auto")


Switch = Annotated[bool | Literal["auto"], BeforeValidator(_true_false_or_auto)]
"""A boolean or `auto`. One validator checks it, because pydantic's errors for a union name each branch."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Transformer block and the sequence mixer of each layer.

    Attributes:
        pattern: mixer name of each layer, e.g. `"attention*12"`, `"(top1_chunk*3,attention)*4"`.
        block: structure around the mixer. transformer: Transformer++ with a SwiGLU feed-forward. rwkv7: the RWKV-7
            block, with a token shift before the mixer and before a two-matrix feed-forward with squared ReLU. mixer: a
            norm, the mixer and the residual connection, without a feed-forward, as in Mamba's own models.
        normalization: norms of the block: RMSNorm, or LayerNorm with a bias.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads of every mixer.
        num_query_groups: key/value heads (GQA). None: num_attention_heads.
        head_dim: width of a head. None: hidden_size / num_attention_heads.
        ffn_hidden_size: inner width of the feed-forward. None: 8/3 * hidden_size rounded up to a multiple of 64, or 4 *
            hidden_size with block rwkv7. Stays None with block mixer.
        max_position_embeddings: rows of a learned position table. None: data.seq_length.
        tie_embeddings: share the input embedding's weight with the output layer.
        rotary_base: base of the rotary frequencies.
        norm_epsilon: epsilon of every norm. RWKV's norm of each head's output uses head_dim times this value.
        init_std: standard deviation of the normal initial weights. For output projections it is divided by the square
            root of their number, which is two per layer, or one per layer with block mixer.
        vocab_size_multiple: the vocabulary is padded to a multiple of this, independent of the layout.
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
    """Parallel layout of the processes. The data-parallel size is world size / (tensor * pipeline * context).

    Attributes:
        tensor: tensor-parallel size (TP). Heads and feed-forward columns are sharded.
        sequence: sequence parallelism (SP): shard activations between the TP regions along the sequence. auto: on if TP
            is above 1 and data.seq_length is a multiple of TP * CP, else off (see `layout.sequence_parallel`). A saved
            configuration keeps `auto`, so that the run can resume with another TP size.
        pipeline: pipeline stages (PP).
        virtual_pipeline: model chunks per stage. Above 1 the schedule is interleaved 1F1B.
        context: context-parallel size (CP). Each rank has one contiguous part of the sequence.
        context_exchange: data that mixers exchange under CP, where they support more than one kind. heads: all-to-all
            of heads against parts of the sequence. states: mixers with a recurrent state send it from each part to the
            next. chunks: mixers that select chunks fetch the selected ones, and each part must be a whole number of
            chunks. States and chunks do not need a head count that is a multiple of CP. auto: the kind with fewer
            bytes. A mixer without the chosen kind also behaves as with auto.
        context_exchange_rounds: number of rounds in which heads are exchanged. The messages of one round overlap with
            the computation of another. Rounds first split the samples of a micro-batch, as far as these divide, so that
            projections also hide messages. Rounds beyond that split the heads, and only the first round is exposed. The
            heads that a rank mixes must be a multiple of this. `mamba` always exchanges all heads in one round, because
            they depend on each other.
        context_transport: transport of exchanged heads. nccl: NCCL, between any GPUs (gloo on CPUs). copy_engine: the
            copy engines of GPUs in one node, which leave the multiprocessors free for computation.
        batch_p2p_comm: Megatron's batched send and receive between pipeline stages. None: on for GPUs, except with the
            interleaved schedule.
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
        path: folder with manifest.json and the shards, or its fsspec URL (s3://bucket/folder).
        cache_dir: local folder for copies of remote shards. One process per machine copies a shard when it is first
            opened and compares its sha256 with the manifest. `verify` then only checks that all remote files have the
            right size. Validation and test shards are copied before training.
        cache_gib: most GiB of training text in cache_dir, plus one shard per process. None: no limit. Samples are read
            in random order, so a run whose shards do not fit copies whole shards again for single samples, and warns
            about it.
        tokenizer: path of a tokenizer.json that must be the one the data was prepared with. None: the one beside the
            manifest.
        train_domains: domains to train on. None: every domain of the manifest with a train split.
        test_domains: domains to test on. None: every domain of the manifest with a test split, except those that have a
            train split and are not in train_domains. Domains without training text are reported as `test` (out of
            domain), those of train_domains as `test_in_domain`. The validation split of train_domains is always
            evaluated, as `validation`.
        weights: share of the samples for each training domain, in any unit. None: in proportion to its tokens. After
            any number of samples each domain is within one sample of its share. A domain that is exhausted starts its
            next epoch.
        seq_length: tokens per sample, before context parallelism splits it.
        verify: check of the shards before training. sha256: checksum of every file, once per run. A resumed run only
            reads files again whose size, inode or timestamps changed (verified_shards.json in its folder), or that
            failed while they were read (failed_shards in its folder). sha256_always: checksum of every file at every
            start, which also finds silent disk corruption. size: file sizes, and the checksum of files that failed
            before.
        on_damaged: reaction to a training shard that this check finds missing or damaged. stop: the run does not start.
            skip: the run leaves the shard out, with a warning and a line in skipped_shards.jsonl. Samples of that shard
            are replaced, and the order of all other samples stays the same. Evaluation text is never skipped. A shard
            that fails after the check stops the run once, with its name. The next start reads it whole on every
            machine, or copies it from its URL again. With skip, `--resume` then leaves it out if it is still damaged.
        document_boundaries: put the document boundaries of packed samples into batches (`Batch.cu_seqlens`), for code
            that reads them. The model only uses them with `reset_attention`. Without it, the model mixes across
            documents.
        reset_attention: restrict attention and recurrent states to the token's own document, in training and in the
            losses by domain. Each document is computed as if it were alone, from position 0 on. Its first token, which
            has no context, counts in no loss.
        reset_positions: restart positions at 0 with every document of a sample, for a learned position table.
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
    """Length, batch, precision, evaluation and checkpoint intervals of a run.

    Attributes:
        steps: optimizer steps.
        global_batch_size: samples per optimizer step.
        micro_batch_size: samples per forward pass on one data-parallel rank.
        precision: dtype of parameters and activations. Gradients are always reduced and accumulated in fp32.
        fp8: FP8 matrix products in the layers, by Transformer Engine on a GPU that supports them. Weights, activations
            between layers and the output layer stay in bf16. tensorwise: one scale per tensor, from its current values
            (E4M3 forward, E5M2 backward). blockwise: one scale per 1 x 128 values, or per 128 x 128 for weights (E4M3).
        seed: seed of the initial weights and of the sample order.
        recompute: activations recomputed in the backward pass. none: nothing. mlp: those of the feed-forward and the
            norm before it, which take more than half of the memory. No mixer is computed twice. full: those of whole
            layers.
        evaluate_every: steps between evaluations by domain. 0: never.
        evaluate_classes: evaluations by domain that also record losses by class of token (docs/token_classes.md). last:
            that after the last step. every: all of them, for losses by class at matched training loss. Their records
            take some twenty times the space of the others.
        evaluate_suites: test suites to run between steps, besides the loss by domain: retrieval, fewshot. The sections
            with these names hold their options.
        evaluate_suites_every: steps between runs of the suites. They also run after the last step.
        evaluation_sequences: most samples evaluated per domain. 0: all.
        checkpoint_every: steps between checkpoints. 0: only when the run ends or receives a stop request.
        keep_checkpoints: newest checkpoints to keep. 0: all.
        keep_every: also keep each checkpoint whose step is a multiple of this, permanently. 0: none.
        async_checkpoints: continue training while a checkpoint is written, which needs memory for a copy of the state.
            False: training waits.
    """

    steps: PositiveInt = 1000
    global_batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt = 4
    precision: Literal["bf16", "fp32"] = "bf16"
    fp8: Literal["none", "tensorwise", "blockwise"] = "none"
    seed: NonNegativeInt = 1234
    recompute: Literal["none", "mlp", "full"] = "none"
    evaluate_every: NonNegativeInt = 0
    evaluate_classes: Literal["none", "last", "every"] = "last"
    evaluate_suites: list[str] = Field(default_factory=list)
    evaluate_suites_every: NonNegativeInt = 0
    evaluation_sequences: NonNegativeInt = 0
    checkpoint_every: NonNegativeInt = 0
    keep_checkpoints: NonNegativeInt = 2
    keep_every: NonNegativeInt = 0
    async_checkpoints: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """Optimizer, its learning rate schedule and its sharding.

    Attributes:
        name: algorithm, one of those registered in `megatron_ext/optim/algorithms/`.
        lr: peak learning rate.
        min_lr: learning rate at the end of the schedule.
        weight_decay: weight decay of matrices. Vectors (norms, gates) have none.
        betas: decay rates of Adam's two moments.
        epsilon: Adam's epsilon.
        clip_grad: largest global gradient norm. 0: no clipping.
        schedule: cosine: warm-up, then cosine decay to min_lr. wsd: warm-up, stable, then linear decay at the end.
            constant: warm-up, then constant.
        warmup_steps: steps of linear warm-up from 0.
        decay_steps: last steps of `wsd`, in which the learning rate falls to min_lr.
        sharding: state sharded over data-parallel ranks. none: nothing. megatron: optimizer state, by Megatron's
            distributed optimizer. zero1: optimizer state, by DeepSpeed. zero2: gradients, too. zero3: parameters, too.
        offload: where DeepSpeed keeps the optimizer state and updates parameters: on the GPU (none) or the CPU.
        offload_parameters: where zero3 keeps parameters while they are not in use.
        deepspeed: path of a JSON file with further DeepSpeed configuration, e.g. for NVMe offload.
    """

    name: str = "adamw"
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
    """Handling of failed steps, and heartbeats.

    A step's loss and gradient norm are checked before parameters are updated. Decisions are recorded in
    decisions.jsonl.

    Attributes:
        retries: how often a failed step is computed again from the same samples before any other reaction. A transient
            hardware error usually does not recur, and the run is then the same as without the error.
        on_nonfinite: reaction to a loss or gradient that is still not finite. stop: end the run with a checkpoint of
            the previous step. skip: leave out the step's samples and keep the parameters. roll_back: continue from the
            newest checkpoint with the samples after those of this step.
        on_spike: the same reactions for a loss or gradient norm far above those of the previous steps. ignore: none.
        spike_deviations: threshold of a spike, in standard deviations above the mean.
        spike_window: previous steps over which mean and deviation are computed. Until there are that many, no step
            counts as a spike.
        limit: most steps that a run may skip or roll back. The next one stops it.
        heartbeat_seconds: seconds between two writes of each rank's heartbeat file, for `selectron status --ranks`. 0:
            no heartbeat.
        straggler_every: steps between comparisons of rank speeds. Each rank times a matrix product and the reading of
            its samples, alone. 0: never.
        straggler_factor: a rank is reported if it takes more than this many times the median of the other ranks.
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
class LoggingConfig:
    """Destinations of a run's metrics. Only the first rank logs.

    JSON lines (metrics.jsonl, evaluation.jsonl, suites.jsonl) and the progress line are always on, because resuming and
    reports read the former.

    Attributes:
        backends: names of further loggers (see `training/loggers/`): tensorboard, wandb, mlflow, trackio. Empty: none.
    """

    backends: list[str] = Field(default_factory=lambda: ["tensorboard"])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSection:
    """Run folder, device and resume options.

    Attributes:
        dir: folder of all runs.
        name: folder of this run inside `dir`.
        backend: Megatron's modules for norms and linear layers: its own (`local`) or Transformer Engine's. auto:
            Transformer Engine's if it is installed and there is a GPU.
        device: cuda, cpu, or auto: cuda if there is a GPU.
        hang_timeout: seconds without a step, forward pass or checkpoint after which a rank exits and prints its stack
            traces to standard error. The first step may compile for a minute. 0: never.
        branch_from: checkpoint of another run to start from (`runs/trunk/checkpoints/step_400`), with its optimizer
            state, data position and records. None: start from initial weights.
        allow_changed: fields that may differ from those of the checkpoint that a run resumes from, e.g. [optimizer.lr].
            Steps before it used the other value, so the change is recorded in decisions.jsonl.
        allow_other_data: resume from a checkpoint even if the training text has changed. Recorded in decisions.jsonl.
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
    """Complete configuration of a run. `mixers` contains the configuration fields of each mixer, by mixer name.

    `retrieval` and `fewshot` contain the options of `selectron evaluate` with the same names, for
    `training.evaluate_suites`.
    """

    data: DataConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    mixers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    resilience: ResilienceConfig = Field(default_factory=ResilienceConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    run: RunSection = Field(default_factory=RunSection)
    retrieval: dict[str, Any] = Field(default_factory=dict)
    fewshot: dict[str, Any] = Field(default_factory=dict)


SUITE_SECTIONS = ("retrieval", "fewshot")
"""Sections whose fields the schema does not define. The suites read them (see `evaluation.registry`)."""
