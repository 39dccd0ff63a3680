"""Times our attention kernels beside their peers, each checked first: the command `selectron bench kernels`."""
