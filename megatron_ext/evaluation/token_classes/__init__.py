"""Losses by class of token: recall from the context, kind of text, training frequency, position."""
