"""The checks of the admission gate, as the worker makes them. Standard library and numpy only."""
