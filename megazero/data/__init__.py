"""Data: text becomes token files, token files become samples, samples become batches."""
