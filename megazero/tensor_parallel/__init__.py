"""Tensor parallelism: conjugate communication pairs and the layers built on them."""
