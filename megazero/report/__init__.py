"""Reports of a run: metrics, writers, the ledger's report, pictures, summaries."""
