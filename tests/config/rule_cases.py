"""Violations and corrections of each rule of the configuration."""

from __future__ import annotations

from typing import Any

Sections = dict[str, dict[str, Any]]

# rule -> (processes, sections that violate it, error line, sections that satisfy it)
CASES: dict[str, tuple[int, Sections, str, Sections]] = {
    "world_size_divides_by_replica": (
        3,
        {"parallel": {"tensor": 2}},
        "parallel: tensor 2 * pipeline 1 * context 1 = 2 processes per replica, which does not divide the world "
        "size 3; "
        "start a multiple of 2 (--processes 4), or lower one of the sizes",
        {"parallel": {"tensor": 1}, "training": {"global_batch_size": 12}},
    ),
    "sequence_parallel_needs_tensor_parallel": (
        2,
        {"parallel": {"sequence": True}},
        "parallel.sequence: true, with parallel.tensor 1; set parallel.tensor above 1, or parallel.sequence=auto",
        {"parallel": {"sequence": True, "tensor": 2}},
    ),
    "interleaving_needs_stages": (
        2,
        {"parallel": {"virtual_pipeline": 2}},
        "parallel.virtual_pipeline: 2, with parallel.pipeline 1; "
        "set parallel.pipeline above 1, or virtual_pipeline to 1",
        {"parallel": {"virtual_pipeline": 2, "pipeline": 2}},
    ),
    "two_interleaved_stages_forbid_batched_p2p": (
        2,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2, "batch_p2p_comm": True}},
        "parallel.batch_p2p_comm: true, with parallel.pipeline 2 and virtual_pipeline 2, gives wrong gradients; "
        "remove it, or set virtual_pipeline to 1",
        {"parallel": {"pipeline": 2, "batch_p2p_comm": True}},
    ),
    "copy_engine_needs_gpu": (
        2,
        {"parallel": {"context": 2, "context_transport": "copy_engine"}, "run": {"device": "cpu"}},
        "parallel.context_transport: copy_engine, with run.device cpu; choose nccl (gloo on CPU), or set "
        "run.device=cuda",
        {"parallel": {"context": 2, "context_transport": "copy_engine"}},
    ),
    "heads_divide_by_query_groups": (
        1,
        {"model": {"num_query_groups": 3}},
        "model.num_query_groups: model.num_attention_heads 8 is not divisible by num_query_groups 3; "
        "give a divisor of model.num_attention_heads",
        {"model": {"num_query_groups": 4}},
    ),
    "heads_divide_by_tensor": (
        3,
        {"parallel": {"tensor": 3}},
        "model.num_attention_heads: num_attention_heads 8 is not divisible by parallel.tensor 3; change one of them",
        {
            "parallel": {"tensor": 3},
            "model": {"num_attention_heads": 6, "head_dim": 8, "ffn_hidden_size": 96, "vocab_size_multiple": 384},
        },
    ),
    "query_groups_divide_by_tensor": (
        4,
        {"parallel": {"tensor": 4}, "model": {"num_query_groups": 2}},
        "model.num_query_groups: num_query_groups 2 is not divisible by parallel.tensor 4; change one of them",
        {"parallel": {"tensor": 4}, "model": {"num_query_groups": 4}},
    ),
    "mixer_block_has_no_ffn": (
        2,
        {"parallel": {"tensor": 2}, "model": {"block": "mixer", "ffn_hidden_size": 96}},
        "model.ffn_hidden_size: 96, with model.block mixer; remove it, or set model.block=transformer",
        {"parallel": {"tensor": 2}, "model": {"block": "mixer"}},
    ),
    "ffn_divides_by_tensor": (
        2,
        {"parallel": {"tensor": 2}, "model": {"ffn_hidden_size": 99}},
        "model.ffn_hidden_size: ffn_hidden_size 99 is not divisible by parallel.tensor 2; give a multiple of 2",
        {"parallel": {"tensor": 2}, "model": {"ffn_hidden_size": 98}},
    ),
    "vocabulary_divides_by_tensor": (
        2,
        {"parallel": {"tensor": 2}, "model": {"vocab_size_multiple": 1}},
        "model.vocab_size_multiple: vocab_size_multiple 1 is not divisible by parallel.tensor 2; give a multiple of 2",
        {"parallel": {"tensor": 2}, "model": {"vocab_size_multiple": 2}},
    ),
    "head_dim_is_even": (
        1,
        {"model": {"head_dim": 7}},
        "model.head_dim: 7 is odd; give an even head_dim, or another num_attention_heads",
        {"model": {"head_dim": 6}},
    ),
    "positions_cover_the_sequence": (
        1,
        {"model": {"max_position_embeddings": 2047}},
        "model.max_position_embeddings: 2047 is less than data.seq_length 2048; give at least 2048, or remove it",
        {"model": {"max_position_embeddings": 2048}},
    ),
    "layers_divide_by_stages": (
        4,
        {"parallel": {"pipeline": 4, "virtual_pipeline": 2}},
        "model.pattern: number of layers 4 is not divisible by parallel.pipeline 4 * virtual_pipeline 2 = 8; "
        "give a multiple of 8 layers",
        {"parallel": {"pipeline": 4, "virtual_pipeline": 2}, "model": {"pattern": "attention*8"}},
    ),
    "sequence_divides_by_ranks": (
        4,
        {"parallel": {"tensor": 2, "context": 2, "sequence": True}, "data": {"seq_length": 30}},
        "data.seq_length: seq_length 30 is not divisible by parallel.tensor 2 * context 2 = 4; "
        "give a multiple of 4, or set parallel.sequence=false",
        {"parallel": {"tensor": 2, "context": 2}, "data": {"seq_length": 30}},
    ),
    "heads_divide_by_context": (
        8,
        {"parallel": {"tensor": 2, "context": 4}, "model": {"num_attention_heads": 4, "pattern": "gated_deltanet"}},
        "parallel.context: gated_deltanet splits its heads, and num_attention_heads 4 / tensor 2 = 2 heads "
        "are not divisible by context 4; choose a context that divides 2, or change model.num_attention_heads",
        {"parallel": {"tensor": 2, "context": 4}, "model": {"num_attention_heads": 4}},
    ),
    "heads_divide_by_rounds": (
        4,
        {
            "parallel": {"tensor": 2, "context": 2, "context_exchange_rounds": 4},
            "model": {"num_attention_heads": 8, "pattern": "gated_deltanet"},
        },
        "parallel.context_exchange_rounds: 4, and num_attention_heads 8 / tensor 2 / context 2 = 2 heads of "
        "gated_deltanet are not divisible by that; choose one that divides 2",
        {
            "parallel": {"tensor": 2, "context": 2, "context_exchange_rounds": 2},
            "model": {"num_attention_heads": 8, "pattern": "gated_deltanet"},
        },
    ),
    "context_shard_divides_by_chunk": (
        2,
        {
            "parallel": {"context": 2, "context_exchange": "chunks"},
            "model": {"pattern": "attention,top1_chunk"},
            "data": {"seq_length": 640},
        },
        "parallel.context_exchange: chunks, and data.seq_length 640 / context 2 = 320 is not divisible by "
        "mixers.top1_chunk.chunk_size 128; give a seq_length that is a multiple of 256, or set "
        "parallel.context_exchange=auto",
        {
            "parallel": {"context": 2, "context_exchange": "chunks"},
            "model": {"pattern": "attention,top1_chunk"},
            "data": {"seq_length": 640},
            "mixers": {"top1_chunk": {"chunk_size": 64}},
        },
    ),
    "remote_data_needs_cache": (
        1,
        {"data": {"path": "s3://bucket/data"}},
        "data.cache_dir: null, with data.path s3://bucket/data; give a folder on a local disk",
        {"data": {"path": "s3://bucket/data", "cache_dir": "/tmp/cache"}},
    ),
    "cache_limit_needs_cache": (
        1,
        {"data": {"cache_gib": 2.5}},
        "data.cache_gib: 2.5, but data.cache_dir is not set; remove it",
        {"data": {"path": "s3://bucket/data", "cache_dir": "/tmp/cache", "cache_gib": 2.5}},
    ),
    "train_domains_are_distinct": (
        1,
        {"data": {"train_domains": ["A", "B", "A"]}},
        "data.train_domains: A is given twice; give each domain once",
        {"data": {"train_domains": ["A", "B"]}},
    ),
    "test_domains_are_distinct": (
        1,
        {"data": {"test_domains": []}},
        "data.test_domains: [] names no domain; give one or more, or remove it to use every domain of the data",
        {"data": {"test_domains": ["A"]}},
    ),
    "some_weight_is_positive": (
        1,
        {"data": {"weights": {"C4": 0.0, "Book": 0}}},
        "data.weights: {'C4': 0.0, 'Book': 0.0} has no weight above 0; "
        "give one, or remove it to sample in proportion to tokens",
        {"data": {"weights": {"C4": 0.0, "Book": 1}}},
    ),
    "reset_positions_needs_learned_positions": (
        1,
        {"data": {"reset_positions": True}},
        "data.reset_positions: true, but no mixer has position_encoding learned; set it to false",
        {
            "data": {"reset_positions": True},
            "model": {"pattern": "attention*3,top1_element"},
            "mixers": {"top1_element": {"position_encoding": "learned"}},
        },
    ),
    "layers_support_document_masking": (
        1,
        {"data": {"reset_attention": True}, "model": {"pattern": "attention*2,rwkv6*2"}},
        "data.reset_attention: true, but rwkv6 in layer 3 shifts tokens across documents; "
        "choose another mixer or block, or set it to false",
        {"data": {"reset_attention": True}, "model": {"pattern": "attention*2,gated_deltanet"}},
    ),
    "reset_attention_forbids_context_parallel": (
        2,
        {"data": {"reset_attention": True}, "parallel": {"context": 2}},
        "data.reset_attention: true, with parallel.context 2; set parallel.context=1, or set it to false",
        {"data": {"reset_attention": True}, "parallel": {"tensor": 2, "sequence": True}},
    ),
    "batch_divides_by_replicas": (
        2,
        {"training": {"global_batch_size": 12}},
        "training.global_batch_size: global_batch_size 12 is not divisible by micro_batch_size 4 * "
        "data-parallel size 2 = 8; give a multiple of 8, or another micro_batch_size",
        {"training": {"global_batch_size": 16}},
    ),
    "interleaving_needs_whole_rounds": (
        2,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "training": {"global_batch_size": 12}},
        "training.global_batch_size: 12 makes 3 micro-batches, which are not divisible by parallel.pipeline 2, "
        "and virtual_pipeline is 2; give a multiple of 8, or set parallel.virtual_pipeline=1",
        {"parallel": {"pipeline": 2}, "training": {"global_batch_size": 12}},
    ),
    "mlp_recompute_needs_ffn": (
        1,
        {"model": {"block": "mixer"}, "training": {"recompute": "mlp"}},
        "training.recompute: mlp, but model.block mixer has no feed-forward; use none or full",
        {"model": {"block": "mixer"}, "training": {"recompute": "full"}},
    ),
    "fp8_needs_transformer_engine": (
        1,
        {"training": {"fp8": "tensorwise"}, "run": {"backend": "local"}},
        "training.fp8: tensorwise, with run.backend local; set training.fp8=none, or run.backend=transformer_engine",
        {"training": {"fp8": "tensorwise"}},
    ),
    "fp8_needs_bf16": (
        1,
        {"training": {"fp8": "blockwise", "precision": "fp32"}},
        "training.fp8: blockwise, with training.precision fp32; set training.fp8=none, or training.precision=bf16",
        {"training": {"fp8": "blockwise", "precision": "bf16"}},
    ),
    "fp8_forbids_deepspeed": (
        1,
        {"training": {"fp8": "tensorwise"}, "optimizer": {"sharding": "zero1"}},
        "training.fp8: tensorwise, with optimizer.sharding zero1; "
        "set training.fp8=none, or optimizer.sharding=megatron",
        {"training": {"fp8": "tensorwise"}, "optimizer": {"sharding": "none"}},
    ),
    "fp8_needs_whole_tiles": (
        1,
        {"training": {"fp8": "tensorwise", "micro_batch_size": 1}, "data": {"seq_length": 40}},
        "training.micro_batch_size: 1 * data.seq_length 40 / parallel.context 1 = 40 tokens, "
        "with training.fp8 tensorwise; give a multiple of 16 tokens, or set training.fp8=none",
        {"training": {"fp8": "tensorwise", "micro_batch_size": 2}, "data": {"seq_length": 40}},
    ),
    "suites_need_interval": (
        1,
        {"training": {"evaluate_suites": ["retrieval"]}},
        "training.evaluate_suites_every: 0, with training.evaluate_suites retrieval; give the steps between them",
        {"training": {"evaluate_suites": ["retrieval"], "evaluate_suites_every": 5}},
    ),
    "roll_back_needs_checkpoints": (
        1,
        {"training": {"checkpoint_every": 0}, "resilience": {"on_spike": "roll_back"}},
        "training.checkpoint_every: 0, with resilience.on_spike roll_back; give the steps between checkpoints",
        {"training": {"checkpoint_every": 5}, "resilience": {"on_spike": "roll_back"}},
    ),
    "min_lr_is_at_most_lr": (
        1,
        {"optimizer": {"lr": 1e-5}},
        "optimizer.min_lr: 3e-05 is above optimizer.lr 1e-05; give at most 1e-05",
        {"optimizer": {"lr": 3e-5}},
    ),
    "decay_steps_need_wsd": (
        1,
        {"optimizer": {"schedule": "wsd"}},
        "optimizer.decay_steps: 0, with optimizer.schedule wsd; give the number of final steps in which the "
        "learning rate decays",
        {"optimizer": {"schedule": "wsd", "decay_steps": 100}},
    ),
    "schedule_fits_the_run": (
        1,
        {"optimizer": {"warmup_steps": 10}, "training": {"steps": 10}},
        "optimizer.warmup_steps: 10 is not less than training.steps 10; give at most 9, or more steps "
        "(selectron train --trial scales the schedule for a short run)",
        {"optimizer": {"warmup_steps": 9}, "training": {"steps": 10}},
    ),
    "gradient_sharding_forbids_pipeline": (
        2,
        {"parallel": {"pipeline": 2}, "optimizer": {"sharding": "zero2"}},
        "optimizer.sharding: zero2 shards gradients at once, but parallel.pipeline 2 must accumulate them; "
        "set parallel.pipeline=1, or optimizer.sharding=zero1",
        {"parallel": {"pipeline": 2}, "optimizer": {"sharding": "zero1"}},
    ),
    "offload_needs_deepspeed": (
        1,
        {"optimizer": {"offload": "cpu"}},
        "optimizer.offload: cpu, with optimizer.sharding megatron; set optimizer.sharding=zero1, or remove it",
        {"optimizer": {"offload": "cpu", "sharding": "zero1"}},
    ),
    "parameter_offload_needs_zero3": (
        1,
        {"optimizer": {"offload_parameters": "cpu", "sharding": "zero2"}},
        "optimizer.offload_parameters: cpu, with optimizer.sharding zero2; set optimizer.sharding=zero3, or remove it",
        {"optimizer": {"offload_parameters": "cpu", "sharding": "zero3"}},
    ),
    "deepspeed_file_needs_deepspeed": (
        1,
        {"optimizer": {"deepspeed": "zero.json"}},
        "optimizer.deepspeed: zero.json, with optimizer.sharding megatron; set optimizer.sharding=zero1, or remove it",
        {"optimizer": {"sharding": "zero1"}},
    ),
    "deepspeed_file_matches_run": (
        1,
        {"optimizer": {"deepspeed": "no/such.json", "sharding": "zero1"}},
        "optimizer.deepspeed: no/such.json cannot be read (No such file or directory); "
        "give a file with DeepSpeed's configuration, or remove it",
        {"optimizer": {"sharding": "zero1"}},
    ),
    "allowed_changes_are_possible": (
        1,
        {"run": {"allow_changed": ["optimizer.l"]}},
        "run.allow_changed: optimizer.l is not a field; did you mean optimizer.lr?",
        {"run": {"allow_changed": ["optimizer.lr", "training.steps", "mixers.attention.window"]}},
    ),
    "transformer_engine_needs_gpu": (
        1,
        {"run": {"backend": "transformer_engine", "device": "cpu"}},
        "run.backend: transformer_engine, with run.device cpu; set run.backend=local, or run.device=cuda",
        {"run": {"backend": "transformer_engine"}},
    ),
}
