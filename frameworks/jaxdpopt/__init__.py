"""jaxdpopt: DP-SGD by masked physical batches of one size."""
