"""The engine: one backward pass, and per-layer rules that turn what it leaves behind into clipped sums."""
