"""Whether a layout computes what one process computes."""
