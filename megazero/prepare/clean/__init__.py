"""Cleaning and deduplication of texts."""
