"""Readers of corpora: JSON lines, Parquet, tars, token files, plain text, and the embedded corpus."""
