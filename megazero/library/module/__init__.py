"""A user's module: what an engine makes of its parameters, buffers and number formats."""
