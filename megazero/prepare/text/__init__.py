"""Texts of any input: files of many kinds, cut into chunks and documents."""
