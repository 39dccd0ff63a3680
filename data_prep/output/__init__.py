"""Prepared folders: tokens to shards, what the tasks wrote to one manifest."""
