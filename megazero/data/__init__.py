"""The data of a run: token files become samples, samples become batches."""
