"""Cleans and deduplicates texts."""
