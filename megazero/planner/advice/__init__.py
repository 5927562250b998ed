"""Searches the layouts of a job for those that fit a machine and are fastest."""
