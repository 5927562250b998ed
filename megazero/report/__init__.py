"""What a run tells its user: metrics, writers, the ledger's report, pictures, summaries."""
