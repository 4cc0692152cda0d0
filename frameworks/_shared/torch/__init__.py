"""Shared by the contestants that run on PyTorch."""
