"""Reports of a run: metrics and their writers, the ledger's report, pictures, summaries."""
