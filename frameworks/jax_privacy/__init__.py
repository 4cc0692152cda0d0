"""JAX Privacy: DP-SGD by ``clipped_grad`` and ``gaussian_privatizer``."""
