"""Data preparation: raw corpora to cleaned, split and tokenised shards with a manifest."""
