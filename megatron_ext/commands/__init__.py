"""Small sub-commands of `selectron`, one per file."""
