"""Inspects corpora: their content, their integrity, and the first difference of two."""
