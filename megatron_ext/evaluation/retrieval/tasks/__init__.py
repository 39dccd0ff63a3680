"""Retrieval tasks, registered by name (`retrieval.registry`); a file may register several."""
