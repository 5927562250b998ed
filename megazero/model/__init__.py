"""GPT-2 in plain modules."""
