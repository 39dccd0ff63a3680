"""Few-shot tests through lm-evaluation-harness (`lm-eval`), which is imported where it is needed: it is an extra."""
