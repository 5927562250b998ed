"""Reads DeepSpeed's JSON configurations strictly, and translates their keys into settings of megazero."""
