"""The plan as one HTML page: memory and time of a step in pictures, traffic by link, and runs with other settings."""
