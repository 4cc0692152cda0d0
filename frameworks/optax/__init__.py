"""Optax: DP-SGD by ``optax.contrib.differentially_private_aggregate``."""
