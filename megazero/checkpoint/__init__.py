"""Checkpoints as named boxes of logical tensors, readable at any layout."""
