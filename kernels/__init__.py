"""Selectron's sequence-mixing ops. A folder an op: reference.py (the meaning), interface.py (the choice)."""
