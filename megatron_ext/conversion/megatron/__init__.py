"""Checkpoints of megatron-core (torch_dist)."""
