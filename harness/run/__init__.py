"""The loops that measure: end to end, layers, frontier, GPU."""
