"""Execution of the stages on this machine, Slurm or Ray, and their progress."""
