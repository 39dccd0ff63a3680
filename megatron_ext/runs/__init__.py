"""Runs read back from their folders: identity, tokenizer and model."""
