"""The command line of a run: flags, files and presets to one configuration."""
