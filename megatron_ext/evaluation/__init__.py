"""Evaluation: loss by domain."""
