"""Opacus, DP-SGD for PyTorch."""
