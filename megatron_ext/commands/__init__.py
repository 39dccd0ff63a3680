"""The verbs of `selectron`, a file each."""
