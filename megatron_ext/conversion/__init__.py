"""Conversion of checkpoints between Selectron, Hugging Face, DeepSpeed universal and plain Megatron formats."""
