"""Contamination of training text by test text: n-grams, report, and filters."""
