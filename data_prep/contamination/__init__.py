"""Test text that stands in training text: its n-grams, the report, and what is dropped for it."""
