"""Scaling laws of loss over parameters and tokens, with their uncertainty."""
