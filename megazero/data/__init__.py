"""What a run reads: token files become samples, samples become batches."""
