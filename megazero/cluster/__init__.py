"""Acceptance tests of a job's nodes before it trains."""
