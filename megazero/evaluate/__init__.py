"""Evaluation of a trained model on a user's files."""
