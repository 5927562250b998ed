"""Checkpoints of runs as named boxes of logical tensors, readable at any layout."""
