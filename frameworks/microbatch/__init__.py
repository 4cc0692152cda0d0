"""DP-SGD as a plain PyTorch loop over single examples."""
