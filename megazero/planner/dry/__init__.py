"""A rank run dry: tensors without memory, the device that would hold them, and a record of all that the rank does."""
