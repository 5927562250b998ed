"""The training run as a story: build, step, loop, evaluate, save."""
