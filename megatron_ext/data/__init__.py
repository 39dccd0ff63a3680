"""Data loading: token streams from shards, an exactly resumable sample order, batches for each rank."""
