"""Rules between settings: each gives the problems it finds, and the nearest legal values."""
