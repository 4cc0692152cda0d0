"""Frames from records, and statistics from frames. Pure functions."""
