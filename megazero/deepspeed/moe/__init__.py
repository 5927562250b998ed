"""DeepSpeed's names of mixtures of experts, which raise an error when they are used."""
