"""DeepSpeed's JSON configurations: their keys, read strictly, as sections of a configuration."""
