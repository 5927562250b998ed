"""What the user chose: frozen dataclasses that hold every setting, and the grammar of their values."""
