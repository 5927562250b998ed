"""Degrees, coordinates and ranks, and the slice of each parameter on each rank.  Pure: no process group."""
