"""Pictures of a run: curves, layouts and ledgers as SVG, and as pixels for TensorBoard."""
