"""The optimizer and what surrounds it: gradient norm, loss scale, learning rate."""
