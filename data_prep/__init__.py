"""Raw corpora to cleaned, split, tokenised shards with a manifest."""
