"""Verification: whether a layout computes what one process computes."""
