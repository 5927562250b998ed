"""Checkpoints of Megatron-LM and DeepSpeed, read without unpickling anything."""
