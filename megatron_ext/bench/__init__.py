"""`selectron bench layers`: the time of one layer's mixer, ours and flash-linear-attention's."""
