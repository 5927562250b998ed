"""Where bytes sit: constant-size buffers and the ledger of bytes by category."""
