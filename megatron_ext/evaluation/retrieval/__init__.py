"""Long-context retrieval tests, by task, length and depth."""
