"""Pipeline schedules as lists of actions, and the small runtime that executes them."""
