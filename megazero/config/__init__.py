"""What the user said: frozen dataclasses, the command line made from them, and the rules between them."""
