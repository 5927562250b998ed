"""Acceptance of the nodes of a job before it trains."""
