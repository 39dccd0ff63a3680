"""Evaluation: loss by domain, few-shot tests, retrieval tests and text generation."""
