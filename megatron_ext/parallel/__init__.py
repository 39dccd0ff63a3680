"""Process groups, collectives, and parameters with their sharding."""
