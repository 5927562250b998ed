"""What a corpus holds, whether it is whole, and where two corpora differ."""
