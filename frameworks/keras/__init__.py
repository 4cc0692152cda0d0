"""Keras 3 on JAX: DP-SGD by JAX Privacy's interface for Keras, and the same without privacy."""
