"""Deduplication: exact and near-duplicates by hashes, and the choice of the document to keep."""
