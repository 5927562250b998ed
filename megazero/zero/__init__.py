"""ZeRO data parallelism: one engine for every stage."""
