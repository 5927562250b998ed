"""Models in the format of Hugging Face's transformers: written, and read by the tables of their families."""
