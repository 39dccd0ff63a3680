"""Optimizers behind one interface: Megatron's and DeepSpeed's ZeRO."""
