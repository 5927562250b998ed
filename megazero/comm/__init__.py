"""Communication between ranks: one interface, and communicators that wrap others of it."""
