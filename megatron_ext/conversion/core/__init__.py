"""Conversion between any two formats: source, rules, destination and verification."""
