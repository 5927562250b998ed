"""Reads the data of a run: token files are made into samples, and samples into batches."""
