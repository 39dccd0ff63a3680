"""Sub-commands of `selectron`, one file each."""
