"""Launching of runs: local processes, Slurm jobs, sweeps, pre-flight checks and status."""
