"""ZeRO-R for activations: recomputation, and where its checkpoints are stored (ZeRO, sections 4.2 and 6.1)."""
