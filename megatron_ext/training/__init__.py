"""Training of a run: data, steps, checkpoints, recovery and evaluation."""
