"""Working parameters: gathered before their use, released after it, published when updated, guarded in between."""
