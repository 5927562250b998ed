"""The configuration: frozen dataclasses that hold the user's value of every setting, and the grammar of values."""
