"""DP-SGD by torch.func, PyTorch's function transforms."""
