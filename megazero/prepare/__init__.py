"""What the tools make before a run: texts, token files, tokenizers, and reports about corpora."""
