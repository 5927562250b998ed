"""Gradients: kept until they are reduced, reduced, summed over other axes, measured and guarded."""
