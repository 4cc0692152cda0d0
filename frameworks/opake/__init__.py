"""Opake, functional DP-SGD for PyTorch."""
