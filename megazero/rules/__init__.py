"""Rules between settings; each yields the problems that it finds, with the nearest legal values."""
