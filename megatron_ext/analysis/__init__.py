"""Analysis of finished runs: comparison at matched training loss, scaling laws and reports."""
