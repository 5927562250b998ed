"""A step of the library: backward passes, the update, and what is recorded of both."""
