"""Text generation from a trained model."""
