"""BackPACK, extensions of PyTorch's backward pass."""
