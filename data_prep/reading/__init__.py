"""Corpora as they lie on disks: JSON lines, Parquet, tars, token files, plain text, the embedded one."""
