"""Reads texts from files of many kinds, which are cut into chunks and documents."""
