"""Optimizers behind one interface."""
