"""PyTorch without differential privacy."""
