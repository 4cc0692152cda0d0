"""PyVacy, DP optimisers for PyTorch: the release of the package registry."""
