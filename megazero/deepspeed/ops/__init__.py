"""DeepSpeed's names of optimizers."""
