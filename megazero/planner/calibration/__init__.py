"""Calibration: what the machine at hand computes and carries a second, measured, as a plan's machine."""
