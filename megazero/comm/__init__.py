"""Communication between ranks: one interface, wrapped and never subclassed."""
