"""Partitions the parameters of a module while it is constructed: `zero.Init`."""
