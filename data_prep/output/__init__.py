"""Output of a preparation: tokens to shards, results of the tasks to one manifest."""
