"""Universal checkpoints of DeepSpeed."""
