"""How bytes move: one interface, wrapped and never subclassed."""
