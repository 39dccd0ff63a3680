"""Retrieval at length: what a model finds again in its context, by task, length and depth."""
