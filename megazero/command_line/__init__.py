"""The command line of a run, which makes one configuration of flags, files and presets."""
