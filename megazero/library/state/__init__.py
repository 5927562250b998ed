"""The state of an engine as its user has it: values of parameters, state_dicts, checkpoints, exported weights."""
