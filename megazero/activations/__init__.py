"""ZeRO-R for activations: recomputation, and how what it starts from is kept (paper sections 4.2 and 6.1)."""
