"""Checks of a job's nodes before training."""
