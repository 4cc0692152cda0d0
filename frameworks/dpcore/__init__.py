"""dpcore, this repository's DP-SGD library."""
