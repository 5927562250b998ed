"""megazero: GPT pretraining with tensor parallelism and ZeRO data parallelism.  Importing it does nothing."""

__version__ = "0.1.0"
