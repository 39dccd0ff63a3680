"""Ops on meta tensors, to plan memory without a GPU."""
