"""The commands that users run, one module each: `megazero pretrain`, `megazero preprocess`, ..."""
