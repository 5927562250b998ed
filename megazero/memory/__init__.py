"""Where bytes sit: constant-size buffers."""
