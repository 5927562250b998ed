"""The inner optimizer and what surrounds it: parameter groups, gradient norm, loss scale, learning rate."""
