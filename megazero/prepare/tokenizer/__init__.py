"""Trains tokenizers."""
