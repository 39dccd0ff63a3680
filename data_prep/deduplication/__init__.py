"""Exact and near-duplicates: found by hashes, and which document of a group stays."""
