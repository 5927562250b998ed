"""What other projects' flags and configuration files mean here."""
