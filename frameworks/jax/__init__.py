"""JAX: DP-SGD by jit(vmap(grad)), and the same without privacy."""
