"""Memory: constant-size buffers, arenas, host memory, and the ledger that counts bytes."""
