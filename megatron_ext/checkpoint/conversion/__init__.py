"""Checkpoints to other formats and back: Hugging Face, DeepSpeed universal, plain Megatron."""
