"""Argument checks, implementation choice and building blocks shared by the ops."""
