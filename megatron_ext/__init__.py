"""Selectron's training stack on Megatron-core: mixers, parallelism, training, evaluation and analysis."""
