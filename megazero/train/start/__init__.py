"""The start of a run, before any process group exists: its checks, inputs and outline, and what it resumes from."""
