"""Inspection of corpora: their content, whether they are whole, and where two of them differ."""
