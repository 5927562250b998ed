"""Prepares corpora by tools before a run: texts, token files, tokenizers, and reports about corpora."""
