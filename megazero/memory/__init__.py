"""Where bytes sit: constant-size buffers, arenas, host memory, and the ledger that counts them."""
