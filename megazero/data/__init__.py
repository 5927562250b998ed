"""The data of a run: makes samples of token files, and batches of samples."""
