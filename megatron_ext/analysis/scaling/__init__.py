"""Scaling laws: how loss falls with parameters and tokens, and how sure that is."""
