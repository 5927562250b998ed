"""GPT-2 as plain modules."""
