"""Few-shot tests with lm-evaluation-harness (`lm-eval`), an optional dependency that is imported lazily."""
