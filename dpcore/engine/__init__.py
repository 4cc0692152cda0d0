"""The engine: clipped sums and private steps for one model and loss."""
