"""Translates the flags and configuration files of other projects into settings of megazero."""
